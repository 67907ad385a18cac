"""SASGD: some local steps, then what they changed is summed over all workers and applied once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import check
from thinwire.strategies.local.base import LocalStrategy, Outer
from thinwire.strategies.local.fragments import Fragments
from thinwire.strategies.settings import check_types


@dataclass(frozen=True, kw_only=True, slots=True)
class SASGD(LocalStrategy):
    """Make `interval` steps alone, then one global reduction: the dense traffic divided by the interval.

    With an interval of 1 it is exact synchronous SGD, also with momentum.

    Reference: Cong, Bhardwaj and Feng, An Efficient, Distributed Stochastic Gradient Descent Algorithm for
    Deep-Learning Applications, ICPP 2017.
    """

    interval: int = 8
    """Steps between two reductions."""
    global_rate: float | None = None
    """What the sum of all changes is multiplied by: the global learning rate over the local one. None: 1/P,
    which averages the workers' models."""

    def __post_init__(self) -> None:
        check_types(self)
        check(self.interval >= 1, "SASGD.interval", "1 or more steps", self.interval)
        valid = self.global_rate is None or self.global_rate > 0
        check(valid, "SASGD.global_rate", "None or a positive number", self.global_rate)

    @property
    def period(self) -> int:
        return self.interval

    def schedule(self, numels: Sequence[int]) -> Fragments:
        return Fragments(numels, 1, self.interval)

    def outer(self, world_size: int) -> Outer:
        return Outer(1.0 if self.global_rate is None else self.global_rate * world_size)
