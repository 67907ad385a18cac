"""SASGD: some local steps, then what they changed is summed over all workers and applied once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.errors import check
from thinwire.strategies.base import Bucket, step_scale
from thinwire.strategies.local.base import LocalState, LocalStrategy, Outer
from thinwire.strategies.local.tuner import FIRST, MOST, IntervalTuner
from thinwire.strategies.measured import costs
from thinwire.strategies.settings import check_types
from thinwire.wire.wire import Wire

MEASURED = (8, 32, 128)
"""Intervals whose cost is told where it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SASGD(LocalStrategy):
    """Make `interval` steps alone, then one global reduction: the dense traffic divided by the interval.

    With an interval of 1 it is exact synchronous SGD, also with momentum.

    Reference: Cong, Bhardwaj and Feng, An Efficient, Distributed Stochastic Gradient Descent Algorithm for
    Deep-Learning Applications, ICPP 2017.
    """

    interval: int | Literal["auto"] = 8
    """Steps between two reductions; "auto": as few as let training wait for at most a share of its time, 32
    at most."""
    exposed: float = 0.05
    """That share, with interval="auto"."""
    global_rate: float | None = None
    """What the sum of all changes is multiplied by: the global learning rate over the local one. None: 1/P,
    which averages the workers' models."""

    def __post_init__(self) -> None:
        check_types(self)
        valid = self.interval == "auto" or self.interval >= 1
        check(valid, "SASGD.interval", "1 or more steps, or 'auto'", self.interval)
        check(0 < self.exposed < 1, "SASGD.exposed", "above 0 and below 1", self.exposed)
        valid = self.global_rate is None or self.global_rate > 0
        check(valid, "SASGD.global_rate", "None or a positive number", self.global_rate)

    @property
    def period(self) -> int:
        return MOST if self.interval == "auto" else self.interval  # several of those it finds

    @property
    def adapts_in(self) -> int:
        return 16 * FIRST if self.interval == "auto" else 0

    def rate_scale(self, state: LocalState, world_size: int, normalised: bool) -> float:
        if self.global_rate is not None:
            return 1.0
        return step_scale(world_size, normalised, state.interval)

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> LocalState:
        state = LocalStrategy.init(self, buckets, wire)
        if self.interval == "auto":
            state.interval = FIRST
            state.tuner = IntervalTuner(self.exposed, len(buckets))
        return state

    def advice(self, num_steps: int | None, world_size: int) -> str:
        longest = self.period
        if world_size == 1 or longest <= MEASURED[0]:
            return ""
        told = [
            f"every {interval} steps cost {row}"
            for interval in MEASURED
            if interval <= longest
            and (row := costs("sasgd", world_size, short=True, interval=interval)) is not None
        ]
        seldom = f", in {num_steps:,} steps perhaps {num_steps // longest} times" if num_steps else ""
        return (
            f"SASGD with interval={self.interval!r} may average only every {longest} steps{seldom}; "
            f"averages {', '.join(told)}; see docs/sasgd.md, 'What it costs in accuracy'"
        )

    def outer(self, world_size: int, normalised: bool) -> Outer:
        return Outer(1.0 if self.global_rate is None else self.global_rate * world_size)
