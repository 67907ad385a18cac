"""Times one block: a system joined, warmed up, settled, and then timed by all workers together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from thinwire.bench.plan import Block, compute_s, num_steps
from thinwire.bench.systems import Ours, System, family_of
from thinwire.engine.link import Link
from thinwire.engine.pieces import FIRST_AGREEMENT
from thinwire.events import StepTimed
from thinwire.lab.control import Control
from thinwire.lab.emulate import Emulated
from thinwire.lab.load import LoadWatch
from thinwire.lab.nets import parse_net
from thinwire.lab.network import sent_by_this_host

WARM_UP_STEPS = 5
"""DDP settles on its buckets in the first ones."""
BUSY = 0.8
"""Share of the processors above which they are the limit even if they are never quite full: in a ring, a
worker that gets its core late keeps all others waiting."""
OPEN_BITS_PER_S = 10e9
"""The rate between blocks, so that joining and warming up take no time worth measuring."""


class Paths:
    """The paths of all hosts, as one. Over loopback there is nothing to shape and nothing to count."""

    def __init__(self, control: Control | None) -> None:
        self._control = control
        self._load = LoadWatch()

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

    @property
    def shaped(self) -> bool:
        return self._control is not None

    def set_rate(self, bits_per_s: float | None) -> None:
        """Called by all workers; when it returns, the rate holds for everyone."""
        dist.barrier()
        if self._control is not None and bits_per_s is not None and dist.get_rank() == 0:
            self._control.set_rate(bits_per_s)
        dist.barrier()

    def open(self) -> None:
        """Let everything through."""
        self.set_rate(OPEN_BITS_PER_S)

    def sent_bytes(self) -> int:
        """What this worker's interface has sent; 0 over loopback."""
        return sent_by_this_host() if self.shaped else 0


@contextmanager
def joined(
    system: System, model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[nn.Module, Optimizer, Link | None]]:
    """A system joined, with its link if it is one of ours."""
    if isinstance(system, Ours):
        with system.attach(model, optimizer) as link:
            yield model, optimizer, link
    else:
        with system.join(model, optimizer) as (wrapped, stepper):
            yield wrapped, stepper, None


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one worker reads off before and after the timed steps."""

    clock_s: float
    processor_s: float
    sent_bytes: int
    metered_bytes: int
    messages: int
    exposed_s: float
    instruments: Mapping[str, float]

    @staticmethod
    def take(paths: Paths, link: Link | None) -> _Reading:
        told = link.stats if link is not None else None
        return _Reading(
            time.perf_counter(),
            time.process_time(),
            paths.sent_bytes(),
            told.sent_bytes if told else 0,
            told.messages if told else 0,
            told.exposed_s if told else 0.0,
            told.instruments if told else {},
        )


def time_block(block: Block, system: System, paths: Paths, *, scale: float, timed_s: float) -> StepTimed:
    """Run one block; called by all workers, and the result is that of all."""
    result = _time_block(block, system, paths, scale, timed_s)
    gc.collect()  # DDP's hooks go with its wrapper, which only now is nobody's
    return result


def _time_block(block: Block, system: System, paths: Paths, scale: float, timed_s: float) -> StepTimed:
    cell = block.cell
    model = Emulated(parse_net(cell.net, scale=scale), seed=dist.get_rank())
    optimizer = SGD(model.parameters(), lr=0.01)
    paths.open()
    with joined(system, model, optimizer) as (wrapped, stepper, link):

        def train(steps: int) -> None:
            for _ in range(steps):
                stepper.zero_grad()
                wrapped(torch.ones(2, 1)).mean().backward()
                stepper.step()

        adapts = isinstance(system, Ours) and system.adapts_in > 0
        if not adapts:  # else it would adapt to a wire and to layers that are not those of the cell
            with model.instant():
                train(WARM_UP_STEPS)
        rate = cell.rate_bits_per_s
        paths.set_rate(None if rate is None else rate * scale)
        train(_steps_to_adapt(system))
        settle_s = _settle(model, train, 1 if adapts else system.period)
        steps = num_steps(timed_s=timed_s, period=system.period, settle_s=settle_s, compute_s=compute_s(cell))
        dist.barrier()
        paths.restart_load()
        before = _Reading.take(paths, link)
        train(steps)
        after = _Reading.take(paths, link)
        full = paths.processor_full()
        paths.open()  # which waits for everyone
        return _of_everyone(block, system, before, after, steps, paths, full, link is not None)


def _steps_to_adapt(system: System) -> int:
    """How many steps at the rate that counts a strategy of ours takes to adapt to it."""
    if not isinstance(system, Ours):
        return 0
    orders = system.strategy.overlap == "forward"
    return 2 * FIRST_AGREEMENT - WARM_UP_STEPS if orders else system.adapts_in


def _settle(model: Emulated, train: Callable[[int], None], period: int) -> float:
    """Go through one period at the rate that counts, so that connections know it; the last step computes in
    its own time, so that what it leaves under way is what a step leaves under way."""
    began = time.perf_counter()
    with model.instant():
        train(period - 1)
    train(1)
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _of_everyone(
    block: Block,
    system: System,
    before: _Reading,
    after: _Reading,
    steps: int,
    paths: Paths,
    full: bool,
    tells: bool,
) -> StepTimed:
    slowest = torch.tensor([after.clock_s - before.clock_s, float(full)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    names = ("processor_s", "sent_bytes", "metered_bytes", "messages", "exposed_s")
    sums = torch.tensor(
        [
            *((getattr(after, name) - getattr(before, name)) / steps for name in names),
            *after.instruments.values(),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(sums)
    processor_s, sent, metered, messages, exposed_s, *told = (sums / block.cell.workers).tolist()
    return StepTimed(
        system=system.name,
        family=family_of(system),
        workers=block.cell.workers,
        rate_bits_per_s=block.cell.rate_bits_per_s,
        net=block.cell.net,
        turn=block.turn,
        step_s=float(slowest[0]) / steps,
        compute_s=compute_s(block.cell),
        exposed_s=exposed_s if tells else None,
        processor_s=processor_s,
        sent_bytes=sent if paths.shaped else metered if tells else None,
        messages=messages if tells else None,
        emulated=True,
        unavailable=None,
        metered_bytes=metered if tells else None,
        processor_full=bool(slowest[1]),
        instruments=dict(zip(after.instruments, told, strict=True)),
    )


def not_timed(block: Block, system: System, reason: str) -> StepTimed:
    """The record of a system that cannot run here."""
    return StepTimed(
        system=system.name,
        family=family_of(system),
        workers=block.cell.workers,
        rate_bits_per_s=block.cell.rate_bits_per_s,
        net=block.cell.net,
        turn=block.turn,
        step_s=None,
        compute_s=compute_s(block.cell),
        exposed_s=None,
        processor_s=None,
        sent_bytes=None,
        messages=None,
        emulated=True,
        unavailable=reason,
    )
