"""The timing harness of `thinwire bench` and of the scripts in benchmarks/.

A block joins one system, warms it up, times whole periods of its steps on all workers, and takes it off
again. Callers interleave the blocks of several systems (`plan.rotated`), so that a busy moment of the machine
hits all of them, and compare blocks of the same turn. All of it runs in workers of a process group.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from thinwire.bench.config import BenchConfig
from thinwire.bench.plan import compute_s, num_steps
from thinwire.bench.systems import Ours, System, family_of
from thinwire.engine.link import Link
from thinwire.engine.pieces import FIRST_AGREEMENT
from thinwire.events import StepTimed
from thinwire.lab.calibrate import CpuLoad
from thinwire.lab.control import Control
from thinwire.lab.emulate import EmulatedModel
from thinwire.lab.nets import parse_net
from thinwire.lab.network import sent_by_this_host
from thinwire.timings import GridCell

WARM_UP_STEPS = 5
"""DDP rebuilds its buckets in the first ones."""
BUSY = 0.8
"""Share of the processors above which they are the limit even if they are never quite full: in a ring, a
worker that gets its core late keeps all others waiting."""
OPEN_BITS_PER_S = 10e9
"""The rate between blocks, so that joining and warming up take no time worth measuring."""

Train = Callable[[int], None]
"""Trains for a number of steps."""


def training(model: nn.Module, optimizer: Optimizer) -> Train:
    """The loop that is timed: plain steps on one fixed batch."""

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 1)).mean().backward()
            optimizer.step()

    return train


def time_steps(
    train: Train, steps: int, counters: Callable[[], Mapping[str, float]] = dict
) -> dict[str, float]:
    """Train, and return per step: `step_s` by the clock, `processor_s` of all threads, and every counter's
    increase."""

    def read() -> dict[str, float]:
        return {"step_s": time.perf_counter(), "processor_s": time.process_time(), **counters()}

    before = read()
    train(steps)
    after = read()
    return {name: (after[name] - before[name]) / steps for name in after}


def warm_up_steps(system: System) -> int:
    """The number of steps after which a system has adapted to the network and to the layers' seconds."""
    if not isinstance(system, Ours):
        return 0
    # overlap="forward" agrees twice on the order in which it sends.
    return 2 * FIRST_AGREEMENT if system.strategy.overlap == "forward" else system.adapts_in


def slowest(value: float) -> float:
    """The maximum over all workers."""
    result = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return float(result)


def mean_over_workers(values: Mapping[str, float]) -> dict[str, float]:
    """Each value's mean; all workers pass the same keys."""
    sums = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(sums)
    return dict(zip(values, (sums / dist.get_world_size()).tolist(), strict=True))


class LabPaths:
    """The network paths of all hosts; over loopback there is nothing to shape and nothing to count."""

    def __init__(self, control: Control | None) -> None:
        self.shaped = control is not None
        self._control = control
        self._load = CpuLoad()

    def restart_load(self) -> None:
        """Watch the processors from here on."""
        if self._control is None:
            self._load.restart()
        elif dist.get_rank() == 0:
            self._control.restart_load()

    def processor_full(self) -> bool:
        """Whether the processors were the limit, as far as this worker knows."""
        if self._control is None:
            return self._load.busy_share > BUSY
        if dist.get_rank() != 0:
            return False
        share, warning = self._control.load()
        return share > BUSY or warning is not None

    def set_rate(self, bits_per_s: float | None) -> None:
        """Shape all paths; called by all workers, and the rate holds for everyone when it returns."""
        dist.barrier()
        if self._control is not None and bits_per_s is not None and dist.get_rank() == 0:
            self._control.set_rate(bits_per_s)
        dist.barrier()

    def sent_bytes(self) -> int:
        """Bytes that this worker's interface has sent; 0 over loopback."""
        return sent_by_this_host() if self.shaped else 0


@contextmanager
def joined(
    system: System, model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[nn.Module, Optimizer, Link | None]]:
    """Join a system; the third value is its link if it is one of ours."""
    if isinstance(system, Ours):
        with system.attach(model, optimizer) as link:
            yield model, optimizer, link
    else:
        with system.join(model, optimizer) as (wrapped, wrapped_optimizer):
            yield wrapped, wrapped_optimizer, None


def block_without_times(cell: GridCell, turn: int, system: System, reason: str | None) -> StepTimed:
    """The record of a block before it is timed, or of a system that cannot run here, with the reason."""
    return StepTimed(
        system=system.name,
        family=family_of(system),
        workers=cell.workers,
        rate_bits_per_s=cell.rate_bits_per_s,
        net=cell.net,
        turn=turn,
        compute_s=compute_s(cell),
        emulated=True,
        unavailable=reason,
    )


def time_block(block: StepTimed, system: System, paths: LabPaths, config: BenchConfig) -> StepTimed:
    """Time one block; called by all workers, which all get the same result."""
    timed, instruments, full = _time(block, system, paths, config)
    gc.collect()  # DDP's hooks live as long as its wrapper, which is garbage only now
    mean = mean_over_workers(timed)
    return replace(
        block,
        step_s=slowest(timed["step_s"]),
        exposed_s=mean.get("exposed_s"),
        processor_s=mean["processor_s"],
        sent_bytes=mean["sent_bytes"] if paths.shaped else mean.get("metered_bytes"),
        messages=mean.get("messages"),
        metered_bytes=mean.get("metered_bytes"),
        processor_full=slowest(full) > 0,
        instruments=mean_over_workers(instruments) if instruments else {},
    )


def _time(
    block: StepTimed, system: System, paths: LabPaths, config: BenchConfig
) -> tuple[dict[str, float], Mapping[str, float], bool]:
    """Times and counters per step of this worker, instruments, and whether processors were full."""
    model = EmulatedModel(parse_net(block.net, scale=config.scale), seed=dist.get_rank())
    rate = None if block.rate_bits_per_s is None else block.rate_bits_per_s * config.scale
    paths.set_rate(OPEN_BITS_PER_S)
    with joined(system, model, SGD(model.parameters(), lr=0.01)) as (wrapped, optimizer, link):
        train = training(wrapped, optimizer)
        settle_s = _settle(system, model, train, lambda: paths.set_rate(rate))
        lengths = {"timed_s": config.block_s, "settle_s": settle_s, "compute_s": block.compute_s}
        steps = num_steps(period=system.period, **lengths)

        def counters() -> dict[str, float]:
            sent = {"sent_bytes": float(paths.sent_bytes())}
            if link is None:
                return sent
            own = link.stats
            told = {"metered_bytes": own.sent_bytes, "messages": own.messages, "exposed_s": own.exposed_s}
            return sent | told

        dist.barrier()
        paths.restart_load()
        timed = time_steps(train, steps, counters)
        instruments = {} if link is None else link.stats.instruments
        full = paths.processor_full()
        paths.set_rate(OPEN_BITS_PER_S)  # a barrier: nobody leaves while others still train
        return timed, instruments, full


def _settle(system: System, model: EmulatedModel, train: Train, set_rate: Callable[[], None]) -> float:
    """Warm up, set the rate, and let connections find it; return the seconds of a period in which only the
    last step computed."""
    steps, adapts = warm_up_steps(system), isinstance(system, Ours) and system.adapts_in > 0
    if not adapts:  # else it would adapt to a network and to layers that are not the cell's
        with model.instant():
            train(WARM_UP_STEPS)
        steps = max(steps - WARM_UP_STEPS, 0)
    set_rate()
    train(steps)
    began_s = time.perf_counter()
    with model.instant():
        train(0 if adapts else system.period - 1)
    train(1)  # with its own seconds: it leaves as much under way as any step does
    return slowest(time.perf_counter() - began_s)
