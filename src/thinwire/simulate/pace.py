"""How long a worker computes: seconds of a step, unequal and varying speed; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from thinwire.errors import check

FORWARD_SHARE = 1 / 3
"""Of the computing time; backward takes the gradients of data and of weights, at one forward each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeModel:
    """How all workers of a simulation compute, in seconds per step at full speed, and send."""

    forward_s: float
    backward_s: float
    """The optimizer's step included."""
    shares: tuple[float, ...] | None = None
    """Each trainable parameter's part of the computing time; None: its part of all parameters."""
    bucket_bytes: int | None = None
    """None: the default of `attach`."""
    alike: bool = False
    """Whether one worker acts for all others of its speed; only with sizes."""

    def __post_init__(self) -> None:
        for name, seconds in (("forward", self.forward_s), ("backward", self.backward_s)):
            check(0 <= seconds < math.inf, name, "seconds, 0 or more", seconds)

    @staticmethod
    def of(seconds: float, *, bucket_bytes: int | None = None) -> ComputeModel:
        """Divide the seconds of a whole step: a third of it is forward."""
        check(0 <= seconds < math.inf, "compute", "seconds, 0 or more", seconds)
        forward_s, backward_s = seconds * FORWARD_SHARE, seconds * (1 - FORWARD_SHARE)
        return ComputeModel(forward_s=forward_s, backward_s=backward_s, bucket_bytes=bucket_bytes)


class Pace:
    """One host's speed: as described, changed by faults, and with a standard deviation of `jitter`."""

    def __init__(self, speed: float, *, jitter: float = 0.0, seed: Sequence[int] = (0,)) -> None:
        check(0 <= jitter < math.inf, "jitter", "a share of the computing time, 0 or more", jitter)
        self.speed = speed
        self.stopped_until_s = 0.0
        self._full = speed
        self._spread = math.sqrt(math.log1p(jitter**2))
        self._random = np.random.default_rng(list(seed))

    def slow(self, speed: float) -> None:
        """Compute at `speed` times the full speed; 1 heals."""
        self.speed = self._full * speed

    def draw(self) -> float:
        """How many times longer than at full speed the coming step takes: log-normal, with a mean of one."""
        spread = self._spread
        vary = math.exp(self._random.normal(-(spread**2) / 2, spread)) if spread else 1.0
        return vary / self.speed


class Timetable:
    """When, within backward and forward, each bucket is full and needed.

    A parameter takes its share of both, which is its share of all parameters unless a profile says
    otherwise. Backward goes from the last parameter to the first, so a bucket is full when its first one
    is reached; forward needs a bucket before its first parameter.
    """

    def __init__(self, shares: Sequence[float], buckets: Sequence[Sequence[int]]) -> None:
        total = sum(shares)
        before = list(accumulate((share / total for share in shares), initial=0.0))
        first = [min(members) for members in buckets]
        self.full = [1.0 - before[index] for index in first]
        """Share of backward that is over when a bucket is full, by bucket."""
        order = sorted(range(len(buckets)), key=lambda bucket: first[bucket])
        self.needs = [(bucket, before[first[bucket]]) for bucket in order]
        """Buckets in the order forward needs them, and the share of forward that is over by then."""
