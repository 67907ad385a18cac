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
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD

import thinwire as tw
from benchmarks.common import (
    lab_worker,
    note,
    parser_of,
    print_head,
    print_row,
    result_file,
    run_in_lab,
)
from thinwire.bench.harness import Train, slowest, time_steps, training, warm_up_steps
from thinwire.bench.systems import Ours
from thinwire.hosts.description import Description, Host, describe
from thinwire.hosts.quantities import format_rate, parse_rate
from thinwire.lab.emulate import EmulatedModel
from thinwire.lab.nets import parse_net
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import step_times
from thinwire.strategies.base import Strategy

NET = "params=2e6,layers=16,forward=0.1,backward=0.2"
BUCKET_BYTES = 1 << 20
STRATEGIES: dict[str, Strategy] = {
    "Silent": tw.Silent(),
    "AllReduce backward": tw.AllReduce(),
    "AllReduce none": tw.AllReduce(overlap="none"),
    "AllReduce forward": tw.AllReduce(overlap="forward"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """The constants of one lab at one rate, measured by the probe."""

    bytes_per_s: float
    latency_s: float
    plain_step_s: float


# -- in the lab -----------------------------------------------------------------------------------------


def worker(rates: list[float], steps: int) -> None:
    """Probe and train at every rate, on every host of the lab."""
    with lab_worker() as control:
        for rate in rates:
            if dist.get_rank() == 0:
                control.set_rate(rate)
            dist.barrier()
            found: dict[str, Any] = {"rate": rate, "constants": asdict(_probe(steps)), "step_s": {}}
            for name, strategy in STRATEGIES.items():
                model = EmulatedModel(parse_net(NET), seed=dist.get_rank())
                optimizer = SGD(model.parameters(), lr=0.01)
                system = Ours(name, strategy, bucket_bytes=BUCKET_BYTES)
                with system.attach(model, optimizer):
                    train = training(model, optimizer)
                    train(max(2, warm_up_steps(system) + 1))
                    found["step_s"][name] = _step_s(train, steps)
            if dist.get_rank() == 0:
                control.report(found)
            dist.barrier()


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
    model = EmulatedModel(parse_net(NET), seed=rank)
    train = training(model, SGD(model.parameters(), lr=0.01))
    train(2)
    return Constants(
        bytes_per_s=ring * len(buckets) * BUCKET_BYTES / reduced_s,
        latency_s=latency_s,
        plain_step_s=_step_s(train, steps),
    )


def _slowest_s(work: Callable[[], object]) -> float:
    dist.barrier()
    began_s = time.perf_counter()
    work()
    return slowest(time.perf_counter() - began_s)


def _step_s(train: Train, steps: int) -> float:
    """The median step of the slowest worker: a mean would include the rare lost packet."""
    return slowest(statistics.median(time_steps(train, 1)["step_s"] for _ in range(steps)))


# -- outside --------------------------------------------------------------------------------------------


def virtual_s(strategy: Strategy, world_size: int, constants: Constants) -> float:
    """Seconds of a step on the clock, with the constants of the probe."""
    net = parse_net(NET)
    hosts = tuple(Host(index=i, rate_bit_per_s=constants.bytes_per_s * 8) for i in range(world_size))
    network = Network(Description(hosts=hosts), latency_s=constants.latency_s)
    forward_s = constants.plain_step_s * net.forward_s / (net.forward_s + net.backward_s)
    model = ComputeModel(
        forward_s=forward_s,
        backward_s=constants.plain_step_s - forward_s,
        shares=net.shares(),
        bucket_bytes=BUCKET_BYTES,
    )
    shapes = [shape for layer in net.layers for shape in layer.shapes]
    return step_times(shapes, network, strategy, model, steps=5).step_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--rates", default="50mbit,200mbit")
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        worker([parse_rate(text) for text in arguments.rates.split(",")], arguments.steps)
        return
    file, cells = result_file("clock"), list[dict[str, Any]]()
    print_head("workers", "rate", "strategy", "lab s/step", "clock s/step", "clock / lab")
    for world_size in map(int, arguments.workers.split(",")):
        inside = ("--inside", "--rates", arguments.rates, "--steps", str(arguments.steps))
        lab = describe(hosts=world_size, rate="1gbit")
        outcome = run_in_lab(lab, "benchmarks.clock", *inside, time_limit_s=600)
        for found in outcome.reports:
            constants, rate = Constants(**found["constants"]), found["rate"]
            for name, lab_s in found["step_s"].items():
                clock_s = virtual_s(STRATEGIES[name], world_size, constants)
                cells.append(
                    {"workers": world_size, "rate": rate, "strategy": name, "lab_s": lab_s}
                    | {"clock_s": clock_s, "busy_share": outcome.busy_share, **asdict(constants)}
                )
                times = (f"{lab_s:.4f}", f"{clock_s:.4f}", f"{clock_s / lab_s:.3f}")
                print_row(world_size, format_rate(rate), name, *times)
    note(f"\nsaved {file.save({'net': NET, 'cells': cells})}")


if __name__ == "__main__":
    main()
