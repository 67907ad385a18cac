"""Is the virtual clock right? Step times of the lab, where bytes cross shaped paths, against the simulator's.

    python -m benchmarks.clock --workers 2,4,8 --rates 50mbit,200mbit      about 5 minutes on 2 quiet cores

In each lab a probe without thinwire measures the constants first: the latency of one message (an all-reduce
of 8 numbers takes 2 (P - 1) of them), bytes per second (all-reduces of 1 MiB, four at once), and the seconds
of a plain training step. With these, and nothing fitted, the simulator plays `Silent` and `AllReduce`. Step
times are medians over steps, of the slowest worker: now and then a packet is lost in the lab, which costs a
step hundreds of milliseconds, and the simulator knows no such thing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import thinwire as tw
from benchmarks.provenance import provenance, save
from thinwire.engine.pieces import FIRST_AGREEMENT
from thinwire.hosts.description import Description, Host, describe
from thinwire.hosts.rates import format_rate, parse_rate
from thinwire.lab.control import Control
from thinwire.lab.emulate import Emulated
from thinwire.lab.job import Job
from thinwire.lab.nets import parse_net
from thinwire.lab.run import run
from thinwire.simulate.network import Network
from thinwire.simulate.pace import Compute
from thinwire.simulate.sizes import pace
from thinwire.simulate.worker import Ways
from thinwire.strategies.base import Strategy

NET = "params=2e6,layers=16,forward=0.1,backward=0.2"
BUCKET_BYTES = 1 << 20
CONTENDERS: dict[str, Strategy] = {
    "Silent": tw.Silent(),
    "AllReduce backward": tw.AllReduce(),
    "AllReduce none": tw.AllReduce(overlap="none"),
    "AllReduce forward": tw.AllReduce(overlap="forward"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What the probe found in one lab at one rate."""

    bytes_per_s: float
    latency_s: float
    plain_step_s: float


# -- in the lab -----------------------------------------------------------------------------------------


def worker(rates: list[float], steps: int) -> None:
    """What every host of the lab does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control = Control.of_this_worker()
    assert control is not None
    for rate in rates:
        if dist.get_rank() == 0:
            control.set_rate(rate)
        dist.barrier()
        found: dict[str, Any] = {"rate": rate, "constants": asdict(_probe(steps)), "step_s": {}}
        for name, strategy in CONTENDERS.items():
            model = Emulated.parse(NET, seed=dist.get_rank())
            optimizer = SGD(model.parameters(), lr=0.01)
            with tw.attach(model, optimizer, strategy, bucket_bytes=BUCKET_BYTES):
                found["step_s"][name] = _step_s(
                    model,
                    optimizer,
                    warm_up=2 * FIRST_AGREEMENT + 1 if strategy.overlap == "forward" else 2,
                    steps=steps,
                )
        if dist.get_rank() == 0:
            control.report(found)
        dist.barrier()
    dist.destroy_process_group()


def _probe(steps: int) -> Constants:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    few, buckets = torch.ones(8), [torch.ones(BUCKET_BYTES // 4) for _ in range(4)]

    def reduce_buckets() -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            assert work is not None
            work.wait()

    dist.all_reduce(few)  # connect
    hops, ring = 2 * (world_size - 1), 2 * (world_size - 1) / world_size
    latency_s = statistics.median(_slowest_s(lambda: dist.all_reduce(few)) for _ in range(20)) / hops
    reduced_s = statistics.median(_slowest_s(reduce_buckets) for _ in range(7)) - hops * latency_s
    model = Emulated.parse(NET, seed=rank)
    plain_s = _step_s(model, SGD(model.parameters(), lr=0.01), warm_up=2, steps=steps)
    return Constants(
        bytes_per_s=ring * len(buckets) * BUCKET_BYTES / reduced_s,
        latency_s=latency_s,
        plain_step_s=plain_s,
    )


def _slowest_s(work: Callable[[], object]) -> float:
    dist.barrier()
    began_s = time.perf_counter()
    work()
    took = torch.tensor(time.perf_counter() - began_s, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _step_s(model: nn.Module, optimizer: SGD, *, warm_up: int, steps: int) -> float:
    x, times = torch.ones(8, 1), []
    dist.barrier()
    for _ in range(warm_up + steps):
        began_s = time.perf_counter()
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began_s)
    median = torch.tensor(statistics.median(times[warm_up:]), dtype=torch.float64)
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return float(median)


# -- outside --------------------------------------------------------------------------------------------


def virtual_s(strategy: Strategy, world_size: int, constants: Constants) -> float:
    """Seconds of a step on the clock, with the constants of the probe."""
    net = parse_net(NET)
    hosts = tuple(Host(index=i, rate_bit_per_s=constants.bytes_per_s * 8) for i in range(world_size))
    network = Network(Description(hosts=hosts), latency_s=constants.latency_s)
    forward_s = constants.plain_step_s * net.forward_s / (net.forward_s + net.backward_s)
    compute = Compute(forward_s=forward_s, backward_s=constants.plain_step_s - forward_s)
    ways = Ways(compute=compute, shares=net.shares(), bucket_bytes=BUCKET_BYTES)
    shapes = [shape for layer in net.layers for shape in layer.shapes]
    return pace(shapes, network, strategy, ways, steps=5).step_s


HEAD = "| workers | rate | strategy | lab s/step | clock s/step | clock / lab |\n|" + " --- |" * 6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--rates", default="50mbit,200mbit")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rates = [parse_rate(text) for text in arguments.rates.split(",")]
    if arguments.inside:
        worker(rates, arguments.steps)
        return
    begin, cells = provenance(), list[dict[str, Any]]()
    print(HEAD, flush=True)
    for world_size in map(int, arguments.workers.split(",")):
        command = ("-m", "benchmarks.clock", "--inside", "--rates", arguments.rates)
        job = Job(
            description=describe(hosts=world_size, rate="1gbit"),
            command=(*command, "--steps", str(arguments.steps)),
            time_limit_s=600,
        )
        outcome = run(job)
        if outcome.exit_code != 0:
            sys.exit(f"the lab of {world_size} ended with exit code {outcome.exit_code}")
        for warning in outcome.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        for found in outcome.reports:
            constants = Constants(**found["constants"])
            for name, lab_s in found["step_s"].items():
                clock_s = virtual_s(CONTENDERS[name], world_size, constants)
                cells.append(
                    {"workers": world_size, "rate": found["rate"], "strategy": name, "lab_s": lab_s}
                    | {"clock_s": clock_s, "busy_share": outcome.busy_share, **asdict(constants)}
                )
                row = [str(world_size), format_rate(found["rate"]), name, f"{lab_s:.4f}", f"{clock_s:.4f}"]
                print("| " + " | ".join([*row, f"{clock_s / lab_s:.3f}"]) + " |", flush=True)
    result = {"begin": begin, "end": provenance(), "net": NET, "cells": cells}
    print(f"\nsaved {save('clock', result, trial=False)}", file=sys.stderr)


if __name__ == "__main__":
    main()
