"""PostLocal: exact SGD to begin with, then local steps with averaging."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.errors import check
from thinwire.strategies.base import Bucket
from thinwire.strategies.local.base import LocalState, LocalStrategy
from thinwire.strategies.settings import check_types
from thinwire.wire.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class PostLocal(LocalStrategy):
    """Average gradients in the first steps, and models every `interval` steps after that.

    Models change most in the beginning.

    Reference: Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2020, arXiv:1808.07217.
    """

    exact_steps: int = 1000
    """Steps of exact SGD."""
    interval: int = 8
    """Steps between two averagings after that."""

    def __post_init__(self) -> None:
        check_types(self)
        check(self.exact_steps >= 0, "PostLocal.exact_steps", "0 or more steps", self.exact_steps)
        check(self.interval >= 1, "PostLocal.interval", "1 or more steps", self.interval)

    @property
    def period(self) -> int:
        return self.interval

    @property
    def adapts_in(self) -> int:
        return self.exact_steps

    async def reduce(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        if bucket.step <= self.exact_steps:
            await wire.all_reduce_(bucket.gradient)
            bucket.gradient.div_(wire.world_size)

    async def mix(self, bucket: Bucket, state: LocalState, wire: Wire) -> None:
        if bucket.step > self.exact_steps:
            await LocalStrategy.mix(self, bucket, state, wire)
        elif bucket.step == self.exact_steps:
            state.anchors[bucket.index].copy_(bucket.read())
