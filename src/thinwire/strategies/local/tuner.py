"""interval="auto": the smallest interval up to MOST at which reductions take no more than a share of time."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Protocol

import torch

from thinwire.wire.wire import Wire

if TYPE_CHECKING:
    from thinwire.strategies.base import Bucket
    from thinwire.strategies.local.base import LocalState

FIRST = 4
"""The interval until something is known."""
MOST = 32
"""A net lost 10 points with reductions every 128 steps, and nobody had asked for that (docs/sasgd.md)."""
MEMORY = 5
"""Reductions that are remembered: their median does not mind one that was disturbed."""
DEAD_BAND = 0.2
"""An interval that would change by less than this stays as it is."""

_log = logging.getLogger("thinwire")


class Tuner(Protocol):
    """What measures a worker's steps and messages, and changes the state when all workers have agreed."""

    async def before(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        """Called for every bucket in every step, before anything of it is looked at."""

    async def begin(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        """A bucket is about to be shared."""

    def end(self, bucket: Bucket, step: int, now_s: float, waited_s: float) -> None:
        """What a bucket began to share in a step was there at that time; training waited so long for it."""


@dataclass(slots=True)
class IntervalTuner:
    """Times the reductions and steps of one worker, and agrees with the others on what follows from them."""

    share: float
    """Part of the time that reductions may take."""
    num_buckets: int
    _reductions: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _began_s: float = 0.0
    _ended: tuple[int, float] | None = None
    """Step and time of the end of the last reduction."""
    _left: int = 0

    async def before(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        """Intervals change where a reduction begins."""

    async def begin(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        """A bucket is about to be reduced; with the first one, agree on the interval from now on."""
        if bucket.index:
            return
        now_s = wire.now()
        if self._ended is not None:
            step, ended_s = self._ended
            self._steps.append((now_s - ended_s) / max(1, bucket.step - step))
        self._left = self.num_buckets
        measured = torch.zeros(2, dtype=torch.float64)
        if self._reductions and self._steps:
            measured = torch.tensor([median(self._reductions), median(self._steps)], dtype=torch.float64)
        everyones = torch.zeros(2 * wire.world_size, dtype=torch.float64)
        await wire.all_gather(measured, everyones)
        wanted = agree(everyones.view(-1, 2).tolist(), self.share)
        interval = min(MOST, wanted)
        if abs(interval - state.interval) > DEAD_BAND * state.interval:
            if wire.rank == 0:
                more = f"; the wire asks for {wanted}, which would cost accuracy" if wanted > MOST else ""
                _log.info("step %d: reductions every %d steps from now on%s", bucket.step, interval, more)
            state.interval, state.origin = interval, bucket.step
        self._began_s = wire.now()

    def end(self, bucket: Bucket, step: int, now_s: float, waited_s: float) -> None:
        self._left -= 1
        if self._left == 0:
            self._reductions.append(now_s - self._began_s)
            self._ended = step, now_s


def agree(measured: Sequence[Sequence[float]], share: float) -> int:
    """The interval that follows from what all workers have measured: seconds of a reduction, and of a step.

    Whoever computes longest waits for nobody but the wire, so the shortest reduction is what the wire takes.

    >>> agree([[0.1, 0.2], [0.2, 0.1]], share=0.05)
    10
    """
    reduction_s, step_s = min(row[0] for row in measured), max(row[1] for row in measured)
    if reduction_s <= 0 or step_s <= 0:
        return FIRST
    return max(1, math.ceil(round(reduction_s / step_s * (1 - share) / share, 6)))
