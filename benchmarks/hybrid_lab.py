"""Step time of data, model and hybrid parallelism: an emulated VGG-A and 7-layer DNN at 1 Gbit/s.

    python -m benchmarks.hybrid_lab                       # needs root
    python -m benchmarks.hybrid_lab --nets dnn7 --workers 4 --turns 1 --steps 1 --trial

Every number of groups G that divides the workers is timed by turns, with PyTorch's DDP in the same run: G = 1
is model-parallel, G = the number of workers data-parallel. "auto" is what `hybridize(groups="auto")` chooses
from the rate and the compute time. Bytes are those of the hosts' interfaces, against the formulas of
`parallel/volumes.py`.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from benchmarks.common import lab_worker, note, parser_of, print_head, print_row, result_file, run_in_lab
from benchmarks.hybrid_nets import BYTES_SCALE, NETS, TIME_SCALE, build, rows
from thinwire.bench.harness import time_steps
from thinwire.hosts.description import describe
from thinwire.lab.network import sent_by_this_host
from thinwire.parallel import HybridPlan, Network, hybridize
from thinwire.parallel.choose import Choice, Costs, costs
from thinwire.parallel.layers import Candidate
from thinwire.parallel.volumes import LayerSize, divisors

RATE_BITS_PER_S = 1e9
LAB_BITS_PER_S = RATE_BITS_PER_S * TIME_SCALE / BYTES_SCALE
LATENCY_S = 0.001
"""Of a message among workers that share two cores."""
WARM_UP_STEPS = 1
SHARDED = "data, sharded"


def systems(workers: int) -> list[str]:
    return ["ddp", SHARDED, *(f"G={groups}" for groups in reversed(divisors(workers)))]


def worker(settings: Mapping[str, Any]) -> None:
    """Time every system, turn after turn, on one host of the lab."""
    with lab_worker() as control:
        workers = dist.get_world_size()
        net = NETS[settings["net"]].at(workers)
        batch = torch.ones(rows(net), 1)
        built = {name: _prepare(name, net, workers) for name in systems(workers)}
        automatic = _automatic(net, workers, batch)
        for turn in range(settings["turns"]):
            for name in systems(workers):
                model, plan = built[name]
                measured = _time(name, model, batch, settings["steps"])
                if dist.get_rank() == 0:
                    formula = _formula(model, plan, workers, rows(net))
                    control.report({"system": name, "turn": turn, "formula_bytes": formula, **measured})
        if dist.get_rank() == 0:
            control.report({"auto": {layer.name: layer.groups for layer in automatic.layers}})


def _prepare(name: str, net: Any, workers: int) -> tuple[nn.Module, HybridPlan | None]:
    model = build(net, seed=dist.get_rank())
    if not name.startswith("G="):
        return model, None
    dense = [each for each, module in model.named_modules() if isinstance(module, nn.Linear)]
    return model, hybridize(model, groups=int(name.removeprefix("G=")), layers=dense)


def _automatic(net: Any, workers: int, batch: torch.Tensor) -> HybridPlan:
    return hybridize(
        build(net, seed=0),
        groups="auto",
        layers="auto",
        example=batch,
        network=Network(bits_per_s=LAB_BITS_PER_S, latency_s=LATENCY_S),
        compute_s=net.forward_s + net.backward_s,
        dry_run=True,
    )


def _time(name: str, model: nn.Module, batch: torch.Tensor, steps: int) -> dict[str, float]:
    """Seconds and bytes of a step, by this worker's clock and interface."""
    trained = DistributedDataParallel(model) if name == "ddp" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    joined: AbstractContextManager[Any] = nullcontext()
    if name != "ddp":
        joined = tw.attach(model, optimizer, tw.AllReduce(), sharded=name == SHARDED, timeout_s=600)

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            trained(batch).mean().backward()
            optimizer.step()

    with joined:
        train(WARM_UP_STEPS)
        dist.barrier()
        found = time_steps(train, steps, lambda: {"sent_bytes": sent_by_this_host()})
        dist.barrier()
    gc.collect()  # a wrapper that is gone must not answer in the next block
    slowest = torch.tensor([found["step_s"]])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {**found, "step_s": float(slowest)}


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


# -- the table ------------------------------------------------------------------------------------------


def measure(name: str, workers: int, turns: int, steps: int) -> dict[str, Any]:
    note(f"{name}, {workers} workers, {turns} turns of {steps} steps ...")
    lab = describe(hosts=workers, rate=f"{LAB_BITS_PER_S:.0f}bit")
    settings = {"net": name, "turns": turns, "steps": steps}
    reports = run_in_lab(lab, "benchmarks.hybrid_lab", "--worker", json.dumps(settings)).reports
    automatic = next(report["auto"] for report in reports if "auto" in report)
    timed = [report for report in reports if "system" in report]
    return {"net": name, "workers": workers, "auto": automatic, "rows": _rows(timed, workers)}


def _rows(timed: Sequence[Mapping[str, Any]], workers: int) -> list[dict[str, Any]]:
    found = []
    for system in systems(workers):
        mine = [report for report in timed if report["system"] == system]
        step_s = [report["step_s"] for report in mine]
        found.append(
            {
                "system": system,
                "step_s": statistics.median(step_s),
                "all_step_s": step_s,
                "sent_bytes": statistics.median(report["sent_bytes"] for report in mine),
                "formula_bytes": mine[0]["formula_bytes"],
                "processor_s": statistics.median(report["processor_s"] for report in mine),
            }
        )
    return found


def show(cell: Mapping[str, Any]) -> None:
    name, workers = cell["net"], cell["workers"]
    net = NETS[name]
    alone_s = net.minibatch * net.seconds_per_sample / TIME_SCALE
    ddp_s = next(row["step_s"] for row in cell["rows"] if row["system"] == "ddp")
    print(f"\n### {name}, {workers} workers, minibatch {net.minibatch}; one worker alone: {alone_s:.2f} s\n")
    print_head("system", "step, s", "over DDP", "over one worker", "MB sent, counted", "over formula")
    for row in cell["rows"]:
        print_row(
            row["system"],
            f"{row['step_s']:.3f}",
            f"{ddp_s / row['step_s']:.2f}x",
            f"{alone_s / row['step_s']:.2f}x",
            f"{BYTES_SCALE * row['sent_bytes'] / 1e6:.1f}",
            f"{row['sent_bytes'] / row['formula_bytes']:.3f}",
        )
    print(f"\nauto: {', '.join(f'{layer} G={groups}' for layer, groups in cell['auto'].items())}")


def predict(name: str, workers: int) -> float:
    """The speed-up over one worker that the choice of groups expects, at full size."""
    net = NETS[name]
    layers = net.at(workers)
    network = Network(bits_per_s=RATE_BITS_PER_S, latency_s=LATENCY_S)
    options: dict[str, dict[int, Costs]] = {}
    rest_bytes = 0
    for layer in layers.layers:
        if not layer.name.startswith("fc"):
            rest_bytes += 4 * layer.num_params
            continue
        out, into = layer.shapes[0]
        size = LayerSize(
            in_features=into, out_features=out, num_weights=layer.num_params, rows=net.minibatch / workers
        )
        options[layer.name] = {
            groups: costs([size], size.better_split, workers, groups, network) for groups in divisors(workers)
        }
    rest_s = network.seconds(2 * (workers - 1) / workers * rest_bytes, 0)
    choice = Choice(options, rest_s, TIME_SCALE * (layers.forward_s + layers.backward_s))
    alone_s = net.minibatch * net.seconds_per_sample
    return alone_s / choice.step_s(choice.best())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=tuple(NETS))
    parser.add_argument("--workers", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--trial", action="store_true", help="not a result: save it below runs/")
    parser.add_argument("--worker", help="what one host of the lab does")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return
    file, cells = result_file("hybrid_lab", trial=arguments.trial), []
    for name in arguments.nets:
        for workers in arguments.workers:
            cells.append(measure(name, workers, arguments.turns, arguments.steps))
            show(cells[-1])
            file.save({"config": vars(arguments), "cells": cells})
    print("\n### Beside the paper (other hardware and networks): speed-up over one node\n")
    print_head("net", "nodes", "Das et al.", "predicted here, 1 Gbit/s")
    predictions = {}
    for name in arguments.nets:
        for workers in sorted({*NETS[name].paper, 64, 128}):
            published = NETS[name].paper.get(workers)
            predictions[f"{name} {workers}"] = predict(name, workers)
            shown = "-" if published is None else f"{published:g}x"
            print_row(name, workers, shown, f"{predictions[f'{name} {workers}']:.1f}x (predicted)")
    file.save({"config": vars(arguments), "cells": cells, "predicted": predictions})
    note(f"saved {file.path}")


if __name__ == "__main__":
    main()
