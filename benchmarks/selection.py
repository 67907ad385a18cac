"""Is selecting as fast as memory? The fused pass against a plain copy and against `torch.topk`.

As many numbers as a ResNet-50 has (25.6 M) on one thread of a CPU, as a VGG-16 has (138 M) on a GPU; one in
a thousand is selected. All rows are timed by turns, after what is selected was compared with plain torch.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import note, parser_of, print_head, print_row, result_file, spread_of
from thinwire.bench.plan import rotated
from thinwire.compress.select import accumulate_select_torch, prepare, select_, select_largest_
from thinwire.compress.sparse import (
    PASSED,
    Sparse,
    SparseLayout,
    Values,
    keep_largest,
    merge,
    merge_torch,
    new_message,
    read,
)
from thinwire.compress.threshold import new_threshold

PASS = "fused pass"
TOPK = "torch.topk of magnitudes alone"
FLOOR = "memory floor"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """A device, the number of elements, and the goals of the fused pass there."""

    device: str
    numel: int
    floor: str
    """The row that is the lower bound of the fused pass."""
    at_most: float
    """Longest fused pass, as a multiple of the lower bound."""
    faster: float
    """Least speed of the fused pass, as a multiple of `torch.topk`'s."""
    density: float = 0.001
    buckets: int = 4
    turns: int = 15


CPU = SelectionConfig(device="cpu", numel=25_600_000, floor="copy", at_most=1.8, faster=12)
GPU = SelectionConfig(device="cuda", numel=138_000_000, floor=FLOOR, at_most=1.5, faster=4)
FLOOR_S_PER_NUMBER = 0.40e-3 / 138e6
"""On an H200: read gradient and residual, write the residual; 12 bytes, at the practical part of 4.8 TB/s."""


class SelectionData:
    """A gradient and a residual with long tails."""

    def __init__(self, config: SelectionConfig) -> None:
        generator = torch.Generator(config.device).manual_seed(0)
        made: dict[str, Any] = {"generator": generator, "device": config.device}
        self.gradient = torch.randn(config.numel, **made).mul_(torch.randn(config.numel, **made).exp_())
        self.begin = torch.randn(config.numel, **made)
        self.residual = self.begin.clone()
        self.sizes = (self.gradient + self.begin).abs_()
        self.k = round(config.density * config.numel)
        self.limit = float(self.sizes.topk(self.k).values.min())

    def message(self, values: Values = "fp32") -> tuple[Tensor, SparseLayout]:
        layout = SparseLayout(capacity=2 * self.k, values=values)
        return new_message(layout, self.residual), layout

    def sum(self) -> Tensor:
        return self.gradient + self.begin


# -- rows -----------------------------------------------------------------------------------------


def rows(config: SelectionConfig, data: SelectionData) -> dict[str, Callable[[], object]]:
    """The operations that are timed; each begins with the same residual."""
    gradient, residual, limit, k = data.gradient, data.residual, data.limit, data.k
    full, half = data.message(), data.message("bf16")
    out = torch.empty_like(gradient)
    parts = list(zip(gradient.chunk(config.buckets), residual.chunk(config.buckets), strict=True))
    thresholds = new_threshold([part for _, part in parts])
    halves = gradient.bfloat16()

    def by_estimate() -> None:
        for bucket, (added, kept) in enumerate(parts):
            select_(added, kept, thresholds.before(bucket, added, kept, config.density), *full)
            thresholds.after(bucket, full[0])

    def in_torch() -> None:
        accumulate_select_torch(gradient, residual, limit, index, value)

    index = torch.empty(2 * k, dtype=torch.int32, device=config.device)
    value = torch.empty(2 * k, device=config.device)
    return {
        "copy": lambda: out.copy_(gradient),
        PASS: lambda: select_(gradient, residual, limit, *full),
        "fused pass, values in bf16": lambda: select_(gradient, residual, limit, *half),
        "fused pass, gradient in bf16": lambda: select_(halves, residual, limit, *full),
        f"with estimated thresholds, {config.buckets} buckets": by_estimate,
        "exactly k": lambda: select_largest_(gradient, residual, k, *full),
        "the same in plain torch": in_torch,
        TOPK: lambda: data.sizes.topk(k, sorted=False),
    }


def sparse_rows(data: SelectionData) -> dict[str, Callable[[], object]]:
    """Merging two messages of k entries, of which a tenth have the same index."""
    message, layout = data.message()
    data.residual.copy_(data.begin)
    select_largest_(data.gradient, data.residual, data.k, message, layout)
    one = read(message, layout)
    shift = torch.arange(data.k, device=one.index.device, dtype=torch.int32) % 10 != 0
    two = Sparse((one.index + shift).unique(), one.value.flip(0))
    two = Sparse(two.index, two.value[: two.index.numel()])
    return {
        "merge two messages, keep the k largest": lambda: keep_largest(merge(one, two), data.k),
        "merge alone, in plain torch": lambda: merge_torch(one, two),
    }


def seconds(work: Callable[[], object], device: str) -> float:
    """Seconds by the clock on a CPU; by events on a GPU, with the host ahead of it as in training."""
    if device == "cpu":
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host gets ahead
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


# -- correctness ----------------------------------------------------------------------------------


def verify(data: SelectionData) -> dict[str, bool]:
    """Against plain torch, bit for bit, on the very numbers that are timed."""
    total, found = data.sum(), dict[str, bool]()
    above = (total.abs() > data.limit).nonzero().view(-1)
    for values in ("fp32", "bf16"):
        message, layout = data.message(values)
        data.residual.copy_(data.begin)
        select_(data.gradient, data.residual, data.limit, message, layout)
        entries, left = read(message, layout), total.clone()
        sent = total[above] if values == "fp32" else total[above].bfloat16().float()
        left[above] -= sent
        found[f"threshold, values in {values}"] = (
            torch.equal(entries.index.long(), above)
            and torch.equal(entries.value, sent)
            and torch.equal(data.residual, left)
        )
    message, layout = data.message()
    data.residual.copy_(data.begin)
    select_largest_(data.gradient, data.residual, data.k, message, layout)
    entries, largest = read(message, layout), data.sizes.topk(data.k).values
    left = total.clone()
    left[entries.index] = 0
    found["exactly k"] = torch.equal(
        entries.value.abs().sort(descending=True).values, largest
    ) and torch.equal(data.residual, left)
    return found


def density(config: SelectionConfig, data: SelectionData) -> list[float]:
    """The count above estimated thresholds in each of ten steps, as a multiple of k."""
    residuals = [part.zero_() for part in data.residual.chunk(config.buckets)]
    thresholds, (message, layout) = new_threshold(residuals), data.message()
    multiples = []
    for _ in range(10):
        passed = 0
        for bucket, added in enumerate(data.gradient.chunk(config.buckets)):
            limit = thresholds.before(bucket, added, residuals[bucket], config.density)
            select_(added, residuals[bucket], limit, message, layout)
            thresholds.after(bucket, message)
            passed += int(message[PASSED])
        multiples.append(passed / data.k)
    return multiples


# -- measuring ------------------------------------------------------------------------------------


def measure(config: SelectionConfig) -> dict[str, Any]:
    note(f"{config.numel:,} numbers on {config.device}: making them, and comparing what is selected ...")
    data = SelectionData(config)
    prepare(data.residual)
    checks = verify(data)
    if not all(checks.values()):
        sys.exit(f"selected something else than plain torch does: {checks}")
    multiples = density(config, data)
    contenders = rows(config, data) | sparse_rows(data)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(config.turns + 1):
        note(f"turn {turn} of {config.turns} ..." if turn else "warming up ...")
        for name in rotated(list(contenders), turn):
            data.residual.copy_(data.begin)
            took_s = seconds(contenders[name], config.device)
            if turn:
                times[name].append(took_s)
    if config.device != "cpu":
        times[FLOOR] = [FLOOR_S_PER_NUMBER * config.numel] * config.turns
    return {"config": asdict(config), "checks": checks, "passed": multiples, "seconds": times}


def show(config: SelectionConfig, result: dict[str, Any]) -> None:
    times: dict[str, list[float]] = result["seconds"]

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))

    where = "one thread" if config.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"\n### Selecting one in {round(1 / config.density):,} of {config.numel / 1e6:g} M numbers, {where}\n"
    )
    print_head("what", "ms (quartiles)", f"times {config.floor}", "times faster than torch.topk")
    for name, taken in times.items():
        ratios = (f"{ratio(name, config.floor):.2f}", f"{ratio(TOPK, name):.1f}")
        print_row(name, spread_of(taken, scale=1e3, digits=3), *ratios)
    slower, faster = ratio(PASS, config.floor), ratio(TOPK, PASS)
    reached = "yes" if slower <= config.at_most and faster >= config.faster else "no"
    goal = f"at most {config.at_most} times {config.floor}, {config.faster:g} times faster than topk"
    print(f"\nTarget: {goal}. Reached: {reached} ({slower:.2f}, {faster:.1f}).")
    passed = ", ".join(f"{multiple:.2f}" for multiple in result["passed"])
    print(f"Same as plain torch, bit for bit: yes. Selected, as multiples of k, in ten steps: {passed}.")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer numbers and turns: shows that it works")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = CPU if arguments.device == "cpu" else GPU
    if arguments.quick:
        config = replace(config, numel=config.numel // 64, turns=3)
    file = result_file("selection", trial=arguments.quick)
    result = measure(config)
    show(config, result)
    result["kernels"] = {name: version(name) for name in ("numba", "triton") if find_spec(name)}
    if config.device != "cpu":
        result["gpu"] = torch.cuda.get_device_name()
    note(f"\nsaved {file.save(result)}")


if __name__ == "__main__":
    main()
