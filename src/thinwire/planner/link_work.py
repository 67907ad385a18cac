"""Processor time that a link itself takes in a step: copies, selection, Python.

Measured with the engine and the strategies as they are, on tensors of the workload's sizes. Two workers of
this process meet in shared memory, so sockets are not in it: their part is the doctor's. Processor seconds
are counted, not time, so that other programs hardly matter.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from thinwire.engine.attach import attach
from thinwire.errors import SettingError, ThinwireError
from thinwire.strategies.base import Strategy
from thinwire.strategies.silent import Silent
from thinwire.wire.local import LocalLane, LocalWorld

WORKERS = 2
MOST_NUMBERS = 1 << 21
"""Size of the largest model that is measured whole; of a larger one, a part of this size is measured."""
BLOCK_S, ENOUGH_S, LEAST_STEPS = 0.03, 0.12, 3
"""Seconds of a block of steps, seconds of all blocks together, and fewest steps of a block; the quickest
block counts."""
SILENT_TRIES = 3
"""Runs that send nothing; strategies are compared with the quickest of them. As memory happens to lie in
caches, a run may take twice as long."""
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkWork:
    """Processor seconds of one worker in a step."""

    training_s: float
    """Seconds in the thread that trains."""
    beside_s: float
    """Seconds in threads beside it."""


LinkWorks = Mapping[Strategy, LinkWork]


def measure_links(shapes: Shapes, strategies: Sequence[Strategy]) -> LinkWorks:
    """Link work of each strategy that can train this model, less that of a link which sends nothing."""
    most = sum(math.prod(shape) for shape in shapes)
    times = max(1.0, most / MOST_NUMBERS)
    threads = torch.get_num_threads()
    with _unheard():
        torch.set_num_threads(1)  # of each worker, as torchrun has it
        try:
            silent = min((_measure(shapes, Silent(), times) for _ in range(SILENT_TRIES)), key=sum)
            found = dict[Strategy, LinkWork]()
            for strategy in dict.fromkeys(strategies):
                try:
                    own = _measure(shapes, strategy, times)
                except SettingError:  # another number of workers, or another model: it is left out anyway
                    continue
                parts = zip(own, silent, strict=True)
                training_s, beside_s = (max(0.0, times * (each - base)) for each, base in parts)
                found[strategy] = LinkWork(training_s=training_s, beside_s=beside_s)
        finally:
            torch.set_num_threads(threads)
    return found


@contextmanager
def _unheard() -> Iterator[None]:
    """Silence the log: warnings of strategies about so short a training are of no interest."""
    log = logging.getLogger("thinwire")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(before)


def _measure(shapes: Shapes, strategy: Strategy, times: float) -> tuple[float, float]:
    """Processor seconds of a step, of one worker: in its training thread, and beside it."""
    world, blocks, errors = LocalWorld(WORKERS), _Blocks(strategy.period), list[BaseException]()

    def work(rank: int) -> None:
        try:
            _train(world.lane(rank), shapes, strategy, times, blocks)
        except BaseException as error:  # noqa: BLE001  # raised in the thread that measures
            errors.append(error)
            blocks.meeting.abort()
            world.lose(error)

    workers = [
        threading.Thread(target=work, args=(rank,), name="thinwire-measure") for rank in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise next((error for error in errors if isinstance(error, ThinwireError)), errors[0])
    return min(blocks.found, key=sum)


class _Blocks:
    """Blocks of steps that all workers make together, each of whole periods."""

    def __init__(self, period: int) -> None:
        self.meeting = threading.Barrier(WORKERS)
        self.found: list[tuple[float, float]] = []
        """Processor seconds per step and worker: in the training thread, and beside it."""
        self._period, self._steps, self._blocks = period, period, 1
        self._in_training_s = [0.0] * WORKERS

    def time(self, rank: int, step: Callable[[], None]) -> None:
        """Make the steps of all blocks; a first period says how many these are."""
        began_s = time.perf_counter()
        for _ in range(self._period):
            step()
        if self.meeting.wait() == 0:
            period_s = max(time.perf_counter() - began_s, 1e-4)
            periods = max(round(BLOCK_S / period_s), -(-LEAST_STEPS // self._period))
            self._steps, self._blocks = self._period * periods, max(1, round(ENOUGH_S / periods / period_s))
        self.meeting.wait()
        for _ in range(self._blocks):
            self.meeting.wait()
            process_s, thread_s = time.process_time(), time.thread_time()
            for _ in range(self._steps):
                step()
            self._in_training_s[rank] = time.thread_time() - thread_s
            if self.meeting.wait() == 0:
                whole_s, training_s = time.process_time() - process_s, sum(self._in_training_s)
                each = self._steps * WORKERS
                self.found.append((training_s / each, max(0.0, whole_s - training_s) / each))


def _train(lane: LocalLane, shapes: Shapes, strategy: Strategy, times: float, blocks: _Blocks) -> None:
    model = nn.Sequential(*(_Layer(math.ceil(math.prod(shape) / times)) for shape in shapes))
    optimizer, inputs = SGD(model.parameters(), lr=0.0), torch.ones(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    with attach(model, optimizer, strategy, process_group=lane):
        for _ in range(max(LEAST_STEPS, strategy.adapts_in)):
            step()
        blocks.time(lane.rank, step)


class _Function(torch.autograd.Function):
    """Identity whose backward gives a parameter a gradient that was made before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return outputs[0], ctx.gradient, None


class _Layer(nn.Module):
    """One parameter, in a module of its own."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self._gradient = torch.randn(numel)

    def forward(self, x: Tensor) -> Tensor:
        return _Function.apply(x, self.weight, self._gradient)  # type: ignore[no-any-return,no-untyped-call]
