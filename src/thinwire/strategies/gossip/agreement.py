"""share="auto": measures how long exchanges take, and agrees on the share that fits behind the compute.

Every few rounds the workers gather their measurements in one small all-gather that nobody waits for. When the
next such round comes all of them have the same numbers, so they come to the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.compress.payload import Payload
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, finished

AGREE_EVERY = 4
"""Rounds between two agreements. Measurements gathered at one are used at the next."""
FILL = 0.9
"""Part of the compute time that exchanges may take."""
DEAD_BAND = 0.1
"""Smallest relative change of a pick; for less it stays as it is."""
STALLED = 0.03
"""Part of the compute time that was waited for exchanges which seemed to fit."""
FIRST_SHARE = 1 / 32
"""Share to begin with, when nothing is known of the wire and the workers' models are still alike."""

_log = logging.getLogger("thinwire")


class Measurement(NamedTuple):
    """Measurements of one worker, per round; all zero if there are none."""

    spread_s: float = 0.0
    """Seconds per byte between the first message of a round and its last: what the wire takes, without
    the time that was spent waiting for a peer to come."""
    whole_s: float = 0.0
    """Seconds per byte from launch to last message."""
    compute_s: float = 0.0
    """Seconds from launch to landing, without the time that was waited there."""
    waited_s: float = 0.0
    num_bytes: float = 0.0
    """Bytes that have come."""


class RoundTimer:
    """Times the rounds of one worker."""

    def __init__(self) -> None:
        self._measurements: list[Measurement] = []
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        """A round is launched."""
        self._began_s = now_s
        self._arrivals: list[tuple[float, int]] = []
        self._waited_s = 0.0

    def arrived(self, now_s: float, num_bytes: int) -> None:
        """A message of the round is there."""
        self._arrivals.append((now_s, num_bytes))

    def waited(self, seconds: float) -> None:
        """Training has waited for a message of the round."""
        self._waited_s += seconds

    def end(self, now_s: float) -> None:
        """The round has landed."""
        (first_s, first_bytes), (last_s, _) = self._arrivals[0], self._arrivals[-1]
        num_bytes = sum(each for _, each in self._arrivals)
        whole_s = (last_s - self._began_s) / num_bytes
        rest = num_bytes - first_bytes
        spread_s = (last_s - first_s) / rest if rest else whole_s
        compute_s = now_s - self._began_s - self._waited_s
        self._measurements.append(Measurement(spread_s, whole_s, compute_s, self._waited_s, num_bytes))

    def measure(self) -> Measurement:
        """The medians since the last measurement: a round with an evaluation in it does not count."""
        rounds, self._measurements = self._measurements, []
        return Measurement(*map(median, zip(*rounds, strict=True)))  # without rounds: nothing measured


@dataclass(frozen=True, slots=True)
class Pick:
    """Payload and chunks that rounds send."""

    payload: Payload
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Options:
    """The possible picks, and their bytes."""

    model_bytes: Mapping[Payload, int]
    """Bytes of the whole model in each payload, from the finest to the coarsest."""
    num_chunks: int

    def best(self, budget: float, now: Pick) -> Pick:
        """The finest payload in which the whole model fits, else as much of it as fits in the coarsest."""
        for payload, num_bytes in self.model_bytes.items():
            finer = num_bytes > self.model_bytes[now.payload]
            if num_bytes <= (1 - DEAD_BAND if finer else 1) * budget:
                return Pick(payload, self.num_chunks)
        num_chunks = int(budget / num_bytes * self.num_chunks)
        return Pick(payload, min(self.num_chunks, max(1, num_chunks)))


def agree(
    measurements: Sequence[Measurement], now: Pick, caution: float, options: Options
) -> tuple[Pick, float]:
    """The pick that fits, from the measurements of all workers, and the caution from now on.

    The slowest worker sets the pace: the others wait for it whatever is sent, and it waits for nobody but
    the wire. So what it has waited is what the wire could not carry.
    """
    pacemaker = max(measurements, key=lambda measurement: measurement.compute_s)
    seconds_per_byte = max(pacemaker.whole_s, *(measurement.spread_s for measurement in measurements))
    if seconds_per_byte <= 0 or pacemaker.compute_s <= 0:
        return now, caution
    # Rounds that were too large, because less was known of the wire when they were picked, say nothing of it.
    fitted = pacemaker.num_bytes * seconds_per_byte <= FILL * pacemaker.compute_s
    stalled = fitted and pacemaker.waited_s > STALLED * pacemaker.compute_s
    caution = max(0.25, 0.85 * caution) if stalled else min(1.0, 1.05 * caution)
    wanted = options.best(FILL * caution * pacemaker.compute_s / seconds_per_byte, now)
    close = abs(wanted.num_chunks - now.num_chunks) <= DEAD_BAND * now.num_chunks
    if wanted.payload == now.payload and close and not stalled:
        return now, caution
    return wanted, caution


@dataclass(slots=True)
class Agreement:
    """One worker's part in the agreement."""

    options: Options
    gathering: Work = field(default_factory=finished)
    _everyone: Tensor | None = field(default=None, repr=False)

    def gather(self, measurement: Measurement, wire: Wire) -> None:
        """Start telling everyone."""
        mine = torch.tensor(measurement, dtype=torch.float64)
        self._everyone = mine.new_empty(wire.world_size * len(mine))
        self.gathering = wire.all_gather(mine, self._everyone)

    def decide(self, now: Pick, caution: float, wire: Wire) -> tuple[Pick, float]:
        """Gives what all agree on, once `gathering` is over; the present pick, if nobody was asked yet."""
        if self._everyone is None:
            return now, caution
        measurements = [Measurement(*row) for row in self._everyone.view(wire.world_size, -1).tolist()]
        pick, caution = agree(measurements, now, caution, self.options)
        if pick != now and wire.rank == 0:
            share = pick.num_chunks / self.options.num_chunks
            _log.info("GossipGraD sends %.3g of the model in each round as %s", share, pick.payload)
        return pick, caution
