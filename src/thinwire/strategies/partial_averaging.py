"""PartialAveraging: every few steps another part of the model becomes the mean of all workers'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.strategies.base import step_scale
from thinwire.strategies.local.base import LocalState, LocalStrategy
from thinwire.strategies.local.fragments import Fragments, check_fragments
from thinwire.strategies.settings import check_types


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialAveraging(LocalStrategy):
    """Average the model over all workers in parts, one after another, so that no part is ever far behind.

    As many bytes as averaging all of it every `interval` steps, in smaller messages.

    Reference: Lee et al., Partial Model Averaging in Federated Learning, 2022, arXiv:2201.03789.
    """

    interval: int = 8
    """Steps after which a part is averaged again."""
    fragments: int | None = None
    """Parts of the model; none: as many as the interval has steps, so that every step averages one."""
    delay: int = 0
    """Steps that a part may take to come back; 0: training waits for it."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fragments("PartialAveraging", self.interval, self.num_fragments, self.delay)

    @property
    def num_fragments(self) -> int:
        return self.interval if self.fragments is None else self.fragments

    @property
    def period(self) -> int:
        return self.interval

    def rate_scale(self, state: LocalState, world_size: int, normalised: bool) -> float:
        return step_scale(world_size, normalised, state.interval)

    def cut(self, numels: Sequence[int]) -> Fragments:
        return Fragments(numels, self.num_fragments)
