"""Step time of data, model and hybrid parallelism: an emulated VGG-A and 7-layer DNN at 1 Gbit/s.

    python -m benchmarks.hybrid_lab                       # needs root
    python -m benchmarks.hybrid_lab --bytes               # what is sent, in large messages
    python -m benchmarks.hybrid_lab --nets dnn7 --workers 4 --steps 1 --trial
    python -m benchmarks.hybrid_lab --nets vgg-a --workers 16 --systems G=2 G=1 auto    # a portion

Every number of groups G that divides the workers is timed, with PyTorch's DDP in the same run: G = 1 is
model-parallel, G = the number of workers data-parallel. "auto" is what `hybridize(groups="auto")` chooses
from the rate and the compute time; "expected" is the step that it reckons with. A turn times one block of
every system; tables show medians over turns. Bytes are those of the hosts' interfaces, against the formulas
of `parallel/volumes.py`.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from benchmarks.common import lab_worker, note, parser_of, print_head, print_row, result_file, run_in_lab
from benchmarks.hybrid_nets import NETS, Scale, build, rows, scale_messages
from benchmarks.hybrid_scaling import LATENCY_S, alone_s, expected_s, show_scaling
from thinwire.bench.harness import LabPaths, mean_over_workers, slowest
from thinwire.bench.plan import rotated
from thinwire.hosts.description import describe
from thinwire.lab.emulate import EmulatedDevice
from thinwire.lab.nets import Net
from thinwire.lab.network import sent_by_this_host
from thinwire.parallel import HybridPlan, Network, hybridize
from thinwire.parallel.layers import Candidate
from thinwire.parallel.volumes import divisors

START_BITS_PER_S = 1e9
"""While a model is handed out to all workers, which is not timed."""
WARM_UP_STEPS = 1
DDP, SHARDED, AUTO = "ddp", "sharded", "auto"
BYTES_WORKERS, BYTES_SCALE = 4, Scale(shrink=2, speed=4.0)


def systems(workers: int) -> list[str]:
    return [DDP, SHARDED, *(f"G={groups}" for groups in reversed(divisors(workers))), AUTO]


def worker(settings: Mapping[str, Any]) -> None:
    """Time every system on one host of the lab."""
    with lab_worker() as control:
        workers, scale = dist.get_world_size(), Scale(*settings["scale"])
        net = NETS[settings["net"]].at(workers, scale.speed)
        batch, paths = torch.ones(rows(net, scale.shrink), 1), LabPaths(control)
        ddp_bucket_mb = scale_messages(scale)

        def block(name: str) -> dict[str, Any]:
            paths.set_rate(START_BITS_PER_S)
            model, plan = _prepare(name, net, scale, batch)
            formula = _formula(model, plan, workers, len(batch))
            trained = DistributedDataParallel(model, bucket_cap_mb=ddp_bucket_mb) if name == DDP else model
            slow_down = lambda: paths.set_rate(scale.bits_per_s)  # noqa: E731
            measured = _time(name, trained, batch, settings["steps"], slow_down)
            groups = {layer.name: layer.groups for layer in plan.layers} if plan else {}
            return {"system": name, "groups": groups, "formula_bytes": formula, **measured}

        for turn in range(settings["turns"]):
            for name in rotated(settings["systems"], turn):
                row = block(name)
                if dist.get_rank() == 0:
                    control.report({"turn": turn, **row})


def _prepare(name: str, net: Net, scale: Scale, batch: torch.Tensor) -> tuple[nn.Module, HybridPlan | None]:
    model = build(net, scale.shrink, seed=dist.get_rank())
    if name in (DDP, SHARDED):
        return model, None
    if name == AUTO:
        network = Network(bits_per_s=scale.bits_per_s, latency_s=LATENCY_S)
        compute_s = net.forward_s + net.backward_s
        _make_instant(model, True)  # it looks at one forward
        plan = hybridize(
            model, groups="auto", layers="auto", example=batch, network=network, compute_s=compute_s
        )
        _make_instant(model, False)
        return model, plan
    dense = [each for each, module in model.named_modules() if isinstance(module, nn.Linear)]
    return model, hybridize(model, groups=int(name.removeprefix("G=")), layers=dense)


def _make_instant(model: nn.Module, instant: bool) -> None:
    for module in model.modules():
        if isinstance(device := getattr(module, "device", None), EmulatedDevice):
            device.instant = instant


def _time(
    name: str, model: nn.Module, batch: torch.Tensor, steps: int, slow_down: Callable[[], None]
) -> dict[str, float]:
    """Seconds and bytes of a step in the middle of a training: from the end of one step to that of another.

    So the weights that `sharded=True` gathers after a step are counted with the forward they hide behind.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    joined: AbstractContextManager[Any] = nullcontext()
    if name != DDP:
        joined = tw.attach(model, optimizer, tw.AllReduce(), sharded=name == SHARDED, timeout_s=600)
    marks = []
    with joined:
        slow_down()
        for _ in range(WARM_UP_STEPS + steps):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
            marks.append((time.perf_counter(), time.process_time(), sent_by_this_host()))
    dist.barrier()
    gc.collect()  # a wrapper that is gone must not answer in the next block
    first, last = marks[WARM_UP_STEPS - 1], marks[-1]
    step_s, processor_s, sent_bytes = ((end - begin) / steps for begin, end in zip(first, last, strict=True))
    means = mean_over_workers({"processor_s": processor_s, "sent_bytes": sent_bytes})
    return {"step_s": slowest(step_s), **means}


def _formula(model: nn.Module, plan: HybridPlan | None, workers: int, num_rows: int) -> float:
    """Bytes of one worker and step, from sizes alone."""
    if plan is None:
        size = sum(p.nbytes for p in model.parameters())
        return 2 * (workers - 1) / workers * size
    total = 2 * (workers - 1) / workers * plan.rest_bytes
    for layer in plan.layers:
        for size_ in Candidate(layer.name, model.get_submodule(layer.name)).sizes(num_rows):
            total += size_.hybrid_bytes(workers, layer.groups, layer.split)
    return total


# -- the tables -----------------------------------------------------------------------------------------


def measure(
    name: str, workers: int, scale: Scale, names: Sequence[str], steps: int, turns: int
) -> dict[str, Any]:
    note(f"{name}, {workers} workers, {turns} blocks of {steps} steps ...")
    lab = describe(hosts=workers, rate=f"{scale.bits_per_s:.0f}bit")
    settings = {"net": name, "scale": scale, "systems": list(names), "steps": steps, "turns": turns}
    outcome = run_in_lab(lab, "benchmarks.hybrid_lab", "--worker", json.dumps(settings))
    return {
        "net": name,
        "workers": workers,
        "scale": scale,
        "rows": outcome.reports,
        "busy_share": outcome.busy_share,
        "warnings": list(outcome.warnings),
    }


def medians(cell: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By system: its last row, with the median step of all turns."""
    steps_s: dict[str, list[float]] = {}
    for row in cell["rows"]:
        steps_s.setdefault(row["system"], []).append(row["step_s"])
    last = {row["system"]: row for row in cell["rows"]}
    return {name: {**last[name], "step_s": statistics.median(each)} for name, each in steps_s.items()}


def show(cell: Mapping[str, Any]) -> None:
    name, workers, scale = cell["net"], cell["workers"], cell["scale"]
    found, whole_s = medians(cell), alone_s(name)
    head = f"{name}, {workers} workers, minibatch {NETS[name].minibatch}; one alone: {whole_s:.2f} s"
    print(f"\n### {head}; processor {cell['busy_share']:.0%} busy\n")
    sent = ("MB sent, counted", "over formula")
    print_head("system", "step, s", "blocks", "expected, s", "over DDP", "over one worker", *sent)
    for system, row in found.items():
        blocks = [scale.speed * each["step_s"] for each in cell["rows"] if each["system"] == system]
        print_row(
            system,
            f"{scale.speed * row['step_s']:.3f}",
            " ".join(f"{each:.2f}" for each in blocks),
            f"{expected_s(cell, row['groups']):.3f}" if row["groups"] else "",
            f"{found[DDP]['step_s'] / row['step_s']:.2f}x" if DDP in found else "",
            f"{whole_s / scale.speed / row['step_s']:.2f}x",
            f"{scale.bytes * row['sent_bytes'] / 1e6:.1f}",
            f"{row['sent_bytes'] / row['formula_bytes']:.3f}",
        )
    equal_s = [row["step_s"] for system, row in found.items() if system.startswith("G=")]
    if AUTO in found and equal_s:
        chosen = ", ".join(f"{layer} G={groups}" for layer, groups in found[AUTO]["groups"].items())
        print(f"\nauto: {chosen}\nauto over the best G: {found[AUTO]['step_s'] / min(equal_s):.3f}")
    if {SHARDED, f"G={workers}"} <= found.keys():
        ratio = found[SHARDED]["step_s"] / found[f"G={workers}"]["step_s"]
        print(f"\nsharded over AllReduce (G={workers}): {ratio:.3f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=tuple(NETS))
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--systems", nargs="+", help="only these")
    parser.add_argument("--steps", type=int, default=4, help="of a block, after one to warm up")
    parser.add_argument("--turns", type=int, default=3, help="blocks of each system")
    parser.add_argument("--speed", type=float, help="the lab runs this many times faster than it stands for")
    parser.add_argument("--bytes", action="store_true", help="count what is sent, with large messages")
    parser.add_argument("--trial", action="store_true", help="not a result: save it below runs/")
    parser.add_argument("--worker", help="what one host of the lab does")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    kind = "hybrid_bytes" if arguments.bytes else "hybrid_lab"
    file, cells = result_file(kind, trial=arguments.trial), list[dict[str, Any]]()
    for name in arguments.nets:
        for workers in [BYTES_WORKERS] if arguments.bytes else arguments.workers:
            scale = BYTES_SCALE if arguments.bytes else NETS[name].scale(workers, arguments.speed)
            chosen = arguments.systems or systems(workers)
            cells.append(measure(name, workers, scale, chosen, arguments.steps, arguments.turns))
            show(cells[-1])
            file.save({"config": vars(arguments)}, cells=cells)
    if not arguments.bytes and all(AUTO in medians(cell) for cell in cells):
        lab = {
            (cell["net"], cell["workers"]): alone_s(cell["net"])
            / cell["scale"].speed
            / medians(cell)[AUTO]["step_s"]
            for cell in cells
        }
        file.save({"config": vars(arguments), "scaling": show_scaling(lab)}, cells=cells)
    note(f"saved {file.path}")


if __name__ == "__main__":
    main()
