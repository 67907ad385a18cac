"""budget="auto": the most accurate of the measured settings whose sending fits behind the compute."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import torch

from thinwire.compress.codec import Codec, Largest
from thinwire.strategies.local.expected import TrickleSetting, options
from thinwire.strategies.local.fragments import Fragments
from thinwire.strategies.local.reduction import encoded_bytes
from thinwire.wire.wire import Wire

if TYPE_CHECKING:
    from thinwire.strategies.base import Bucket
    from thinwire.strategies.local.base import LocalState

INTERVAL = 8
PROBES = (Largest.of(0.03), Largest.of(0.12))
"""How messages look that are timed, for INTERVAL steps each: latency and rate follow from both."""
DECIDES_AT = len(PROBES) * INTERVAL + 1
FITS = 0.8
"""Part of the compute that sending may take: it is less even than what was timed."""

_log = logging.getLogger("thinwire")


@dataclass(slots=True)
class BudgetTuner:
    """Times the messages and steps of one worker, and agrees with the others on settings that fit."""

    numels: Sequence[int]
    itemsize: int
    _began_s: dict[int, float] = field(default_factory=dict)
    """By step: when its messages were sent."""
    _sent_s: dict[int, float] = field(default_factory=dict)
    """Seconds until the last of them was back."""
    _waited_s: dict[int, float] = field(default_factory=dict)
    """Seconds that training waited for them."""
    _marks_s: dict[int, float] = field(default_factory=dict)
    """When the step was over."""
    _agreed: int | None = None
    _applied: bool = False

    async def before(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        """Settings change between two steps: before the first coroutine of a step, for all of them."""
        if bucket.index or self._applied or wire.world_size == 1:
            return
        if self._agreed is not None:
            state.chosen, state.origin = self._agreed, bucket.step - 1
        if state.chosen >= 0:
            row = options(wire.world_size)[state.chosen]
            state.interval, state.codec = row.interval, row.codec
            state.fragments, self._applied = Fragments(self.numels, row.interval), True
            return
        if not self._marks_s:  # the first step, also after a checkpoint that had not chosen yet
            state.origin = bucket.step - 1
        self._marks_s[bucket.step] = wire.now()
        done = bucket.step - state.origin - 1
        if done < DECIDES_AT - 1:
            state.codec = PROBES[done // INTERVAL]
        else:  # others may be in this step already, so it holds from the next one on
            self._agreed = await self._decide(state.origin, wire)

    async def begin(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        if not self._applied:
            self._began_s.setdefault(bucket.step, wire.now())

    def end(self, bucket: Bucket, step: int, now_s: float, waited_s: float) -> None:
        if step in self._began_s:
            self._sent_s[step] = max(self._sent_s.get(step, 0.0), now_s - self._began_s[step])
            self._waited_s[step] = self._waited_s.get(step, 0.0) + waited_s

    async def _decide(self, origin: int, wire: Wire) -> int:
        """The index of the option that fits; the same on all workers."""
        windows = [
            range(origin + probe * INTERVAL + 3, origin + (probe + 1) * INTERVAL + 1) for probe in (0, 1)
        ]  # without the first two steps, which connect
        alone = [
            self._marks_s[step + 1] - self._marks_s[step] - self._waited_s.get(step, 0.0)
            for window in windows
            for step in window
        ]
        times = [median(alone)]
        times += [median(self._sent_s.get(step, 0.0) for step in window) for window in windows]
        own = torch.tensor(times, dtype=torch.float64)
        everyones = own.new_empty(len(times) * wire.world_size)
        await wire.all_gather(own, everyones)
        table = everyones.view(-1, len(times))
        # Whoever computes longest waits for nobody but the wire, so the shortest message is what that takes.
        compute_s = float(table[:, 0].max())
        small_s, large_s = (float(table[:, column].min()) for column in (1, 2))
        rows = options(wire.world_size)
        expected_s = [self._seconds(row, small_s, large_s, wire.world_size) for row in rows]
        chosen = choose(expected_s, FITS * compute_s)
        if wire.rank == 0:
            _say(origin + DECIDES_AT, rows[chosen], expected_s[chosen], compute_s)
        return chosen

    def _seconds(self, row: TrickleSetting, small_s: float, large_s: float, world_size: int) -> float:
        """What a step of this setting will take to send, by the line through both probes."""
        at = [self._bytes(INTERVAL, codec, world_size) for codec in PROBES]
        slope = max(0.0, large_s - small_s) / max(1, at[1] - at[0])
        sent = self._bytes(row.interval, row.codec, world_size)
        return max(0.0, small_s - slope * at[0]) + slope * sent

    def _bytes(self, interval: int, codec: Codec, world_size: int) -> int:
        part = max(1, sum(self.numels) // interval)
        return encoded_bytes(part, self.itemsize, codec, world_size)


def choose(expected_s: Sequence[float], limit_s: float) -> int:
    """The first option that fits, or the quickest if none does.

    >>> choose([0.4, 0.2, 0.1], limit_s=0.25), choose([0.4, 0.2, 0.3], limit_s=0.1)
    (1, 1)
    """
    fitting = [index for index, seconds in enumerate(expected_s) if seconds <= limit_s]
    return fitting[0] if fitting else min(range(len(expected_s)), key=lambda index: expected_s[index])


def _say(step: int, row: TrickleSetting, sent_s: float, compute_s: float) -> None:
    hidden = "hidden behind" if sent_s <= compute_s else "more than"
    _log.info(
        "step %d: %s from now on: %.2f %% of the dense bytes, %.3f s a step, "
        "%s %.3f s of compute; expect %.1f points less accuracy than exact SGD (measured: %s, %d workers)",
        *(step, row, 100 * row.bytes_share, sent_s, hidden, compute_s),
        *(row.points, row.where, row.workers),
    )
