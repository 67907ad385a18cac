"""Step time of data, model and hybrid parallelism: an emulated VGG-A and 7-layer DNN at 1 Gbit/s.

    python -m benchmarks.hybrid_lab                       # needs root
    python -m benchmarks.hybrid_lab --bytes               # what is sent, in large messages
    python -m benchmarks.hybrid_lab --nets dnn7 --workers 4 --steps 1 --trial

Every number of groups G that divides the workers is timed, with PyTorch's DDP in the same run: G = 1 is
model-parallel, G = the number of workers data-parallel. "auto" is what `hybridize(groups="auto")` chooses
from the rate and the compute time. Bytes are those of the hosts' interfaces, against the formulas of
`parallel/volumes.py`.
"""

from __future__ import annotations

import gc
import json
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
from benchmarks.hybrid_nets import NETS, RATE_BITS_PER_S, Scale, build, rows
from thinwire.bench.harness import LabPaths, mean_over_workers, slowest
from thinwire.hosts.description import describe
from thinwire.lab.emulate import EmulatedDevice
from thinwire.lab.nets import Net
from thinwire.lab.network import sent_by_this_host
from thinwire.parallel import HybridPlan, Network, hybridize
from thinwire.parallel.choose import Choice, Costs, costs
from thinwire.parallel.layers import Candidate
from thinwire.parallel.volumes import LayerSize, divisors

LATENCY_S = 0.001
"""Of a message among workers that share two cores."""
START_BITS_PER_S = 1e9
"""While a model is handed out to all workers, which is not timed."""
WARM_UP_STEPS = 1
DDP, SHARDED, AUTO = "ddp", "data, sharded", "auto"
BYTES_WORKERS, BYTES_SCALE = 4, Scale(shrink=2, speed=4.0)


def systems(workers: int) -> list[str]:
    return [DDP, SHARDED, *(f"G={groups}" for groups in reversed(divisors(workers))), AUTO]


def worker(settings: Mapping[str, Any]) -> None:
    """Time every system on one host of the lab."""
    with lab_worker() as control:
        workers, scale = dist.get_world_size(), Scale(*settings["scale"])
        net = NETS[settings["net"]].at(workers, scale.speed)
        batch, paths = torch.ones(rows(net, scale.shrink), 1), LabPaths(control)
        for name in settings["systems"]:
            paths.set_rate(START_BITS_PER_S)
            model, plan = _prepare(name, net, scale, batch)
            formula = _formula(model, plan, workers, len(batch))
            measured = _time(name, model, batch, settings["steps"], lambda: paths.set_rate(scale.bits_per_s))
            if dist.get_rank() == 0:
                groups = {layer.name: layer.groups for layer in plan.layers} if plan else {}
                control.report({"system": name, "groups": groups, "formula_bytes": formula, **measured})


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
    trained = DistributedDataParallel(model) if name == DDP else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    joined: AbstractContextManager[Any] = nullcontext()
    if name != DDP:
        joined = tw.attach(model, optimizer, tw.AllReduce(), sharded=name == SHARDED, timeout_s=600)
    marks = []
    with joined:
        slow_down()
        for _ in range(WARM_UP_STEPS + steps):
            optimizer.zero_grad()
            trained(batch).mean().backward()
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


def measure(name: str, workers: int, scale: Scale, names: Sequence[str], steps: int) -> dict[str, Any]:
    note(f"{name}, {workers} workers, {steps} steps ...")
    lab = describe(hosts=workers, rate=f"{scale.bits_per_s:.0f}bit")
    settings = {"net": name, "scale": scale, "systems": list(names), "steps": steps}
    outcome = run_in_lab(lab, "benchmarks.hybrid_lab", "--worker", json.dumps(settings))
    warnings = list(outcome.warnings)
    return {"net": name, "workers": workers, "scale": scale, "rows": outcome.reports, "warnings": warnings}


def show(cell: Mapping[str, Any]) -> None:
    name, workers, scale = cell["net"], cell["workers"], cell["scale"]
    alone_s = _alone_s(cell)
    by_system = {row["system"]: row for row in cell["rows"]}
    print(f"\n### {name}, {workers} workers, minibatch {NETS[name].minibatch}; one alone: {alone_s:.2f} s\n")
    print_head("system", "step, s", "over DDP", "over one worker", "MB sent, counted", "over formula")
    for row in cell["rows"]:
        print_row(
            row["system"],
            f"{scale.speed * row['step_s']:.3f}",
            f"{by_system[DDP]['step_s'] / row['step_s']:.2f}x" if DDP in by_system else "",
            f"{alone_s / scale.speed / row['step_s']:.2f}x",
            f"{scale.bytes * row['sent_bytes'] / 1e6:.1f}",
            f"{row['sent_bytes'] / row['formula_bytes']:.3f}",
        )
    if AUTO not in by_system:
        return
    equal_s = min(row["step_s"] for system, row in by_system.items() if system.startswith("G="))
    data_s = by_system[f"G={workers}"]["step_s"]
    chosen = ", ".join(f"{layer} G={groups}" for layer, groups in by_system[AUTO]["groups"].items())
    print(f"\nauto: {chosen}")
    print(f"auto over the best G: {by_system[AUTO]['step_s'] / equal_s:.3f}")
    print(f"sharded over AllReduce (G={workers}): {by_system[SHARDED]['step_s'] / data_s:.3f}")


def _alone_s(cell: Mapping[str, Any]) -> float:
    """Seconds of one worker with the whole minibatch, at full size."""
    net = NETS[cell["net"]]
    return net.minibatch * net.seconds_per_sample


def predict(name: str, workers: int, rate_bits_per_s: float, minibatch: int) -> float:
    """The speed-up over one worker that the choice of groups expects, at full size."""
    net = NETS[name]
    layers = net.at(workers, minibatch=minibatch)
    network = Network(bits_per_s=rate_bits_per_s, latency_s=LATENCY_S)
    options: dict[str, dict[int, Costs]] = {}
    rest_bytes = 0
    for layer in layers.layers:
        if not layer.name.startswith("fc"):
            rest_bytes += 4 * layer.num_params
            continue
        out, into = layer.shapes[0]
        size = LayerSize(
            in_features=into, out_features=out, num_weights=layer.num_params, rows=minibatch / workers
        )
        options[layer.name] = {
            groups: costs([size], size.better_split, workers, groups, network) for groups in divisors(workers)
        }
    rest_s = network.seconds(2 * (workers - 1) / workers * rest_bytes, 0)
    choice = Choice(options, rest_s, layers.forward_s + layers.backward_s)
    return minibatch * net.seconds_per_sample / choice.step_s(choice.best())


def show_scaling(cells: Sequence[Mapping[str, Any]], nets: Sequence[str]) -> list[dict[str, Any]]:
    """Speed-ups over one node: published, measured in the lab, and predicted."""
    print("\n### Beside the paper (other hardware and networks): speed-up over one node\n")
    print_head(
        "net",
        "nodes",
        "minibatch",
        "Das et al.",
        "lab, 1 Gbit/s",
        "predicted, 1 Gbit/s",
        "predicted, 10 Gbit/s",
    )
    found = []
    for name in nets:
        measured = {
            cell["workers"]: _alone_s(cell) / cell["scale"].speed / row["step_s"]
            for cell in cells
            if cell["net"] == name
            for row in cell["rows"]
            if row["system"] == AUTO
        }
        for nodes in sorted({*measured, *NETS[name].paper, 64, 128}):
            published = NETS[name].paper.get(nodes)
            minibatch = published.minibatch if published else NETS[name].minibatch
            rates = (RATE_BITS_PER_S, 10 * RATE_BITS_PER_S)
            predicted = [predict(name, nodes, rate, minibatch) for rate in rates]
            paper = published.speed_up if published else None
            found.append(
                {
                    "net": name,
                    "nodes": nodes,
                    "minibatch": minibatch,
                    "paper": paper,
                    "lab": measured.get(nodes),
                    "predicted": predicted,
                }
            )
            speeds = ["-" if each is None else f"{each:.1f}x" for each in (paper, measured.get(nodes))]
            print_row(name, nodes, minibatch, *speeds, *(f"{each:.1f}x (predicted)" for each in predicted))
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=tuple(NETS))
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--systems", nargs="+", help="only these")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--bytes", action="store_true", help="count what is sent, with large messages")
    parser.add_argument("--trial", action="store_true", help="not a result: save it below runs/")
    parser.add_argument("--worker", help="what one host of the lab does")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    kind = "hybrid_bytes" if arguments.bytes else "hybrid_lab"
    file, cells, scaling = result_file(kind, trial=arguments.trial), [], []
    for name in arguments.nets:
        for workers in [BYTES_WORKERS] if arguments.bytes else arguments.workers:
            scale = BYTES_SCALE if arguments.bytes else NETS[name].scale(workers)
            chosen = arguments.systems or systems(workers)
            cells.append(measure(name, workers, scale, chosen, arguments.steps))
            show(cells[-1])
            file.save({"config": vars(arguments), "cells": cells})
    if not arguments.bytes:
        scaling = show_scaling(cells, arguments.nets)
        file.save({"config": vars(arguments), "cells": cells, "scaling": scaling})
    note(f"saved {file.path}")


if __name__ == "__main__":
    main()
