"""HierarchicalAveraging: models are averaged often among neighbours, and seldom over all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from thinwire.errors import check
from thinwire.strategies.base import Bucket, Seam, Strategy
from thinwire.strategies.local.groups import Groups, Nearness, Neighbours, group_of
from thinwire.strategies.parts import check_finite
from thinwire.strategies.settings import check_types
from thinwire.wire.wire import Wire

Inside = Literal["models", "gradients"]


@dataclass(slots=True)
class HierarchyState:
    """Who is in which group."""

    neighbours: Neighbours = field(init=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalAveraging(Strategy):
    """Average models inside a group every `inner_interval` steps, and over all every `interval`.

    Where groups are of one size, the mean of all is taken in strips: each worker of a group averages one
    strip with its counterparts in the other groups, so between groups a worker sends its strip only.

    Reference: Zhou and Cong, A Distributed Hierarchical SGD Algorithm with Sparse Global Reduction, 2019,
    arXiv:1903.05133.
    """

    inner_interval: int = 1
    """Steps between two averagings inside a group."""
    interval: int = 16
    """Steps between two averagings over all workers; a multiple of `inner_interval`."""
    groups: Nearness | int = "site"
    """Who is in a group: workers of a host, of a site (THINWIRE_SITE), those that fast paths join as they are
    measured at the start, or so many in order of rank."""
    inside: Inside = "models"
    """What is averaged inside a group: "models", or "gradients" in every step, which is exact SGD there
    whatever the optimizer is."""

    def __post_init__(self) -> None:
        check_types(self)
        name, inner = "HierarchicalAveraging", self.inner_interval
        check(self.interval >= 1, f"{name}.interval", "1 or more steps", self.interval)
        divides = inner >= 1 and self.interval % inner == 0
        check(divides, f"{name}.inner_interval", f"a divisor of interval ({self.interval})", inner)
        check(
            not isinstance(self.groups, int) or self.groups >= 1, f"{name}.groups", "1 or more", self.groups
        )
        once = self.inside == "models" or inner == 1
        check(once, f"{name}.inner_interval", "1 where gradients are averaged inside", inner)

    @property
    def period(self) -> int:
        return self.interval

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> HierarchyState:
        state = HierarchyState()
        state.neighbours = Neighbours(self.groups, "HierarchicalAveraging.groups", wire)
        return state

    def uses(self, seam: Seam) -> bool:
        return seam != "reduce" or self.inside == "gradients"

    async def reduce(self, bucket: Bucket, state: HierarchyState, wire: Wire) -> None:
        own = await state.neighbours.own(wire)
        await wire.group(own).all_reduce_(bucket.gradient)
        bucket.gradient.div_(len(own))

    async def mix(self, bucket: Bucket, state: HierarchyState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        inside = self.inside == "models" and bucket.step % self.inner_interval == 0
        everywhere = bucket.step % self.interval == 0
        if not (inside or everywhere):
            return
        flat = check_finite(bucket.read(), bucket)
        groups = await state.neighbours.groups(wire)
        if everywhere:
            await _mean_of_all_(flat, groups, wire)
        else:
            own = group_of(wire.rank, groups)
            await wire.group(own).all_reduce_(flat)
            flat.div_(len(own))
        bucket.write_(flat)


async def _mean_of_all_(flat: Tensor, groups: Groups, wire: Wire) -> None:
    """Overwrite with the mean over all workers: in strips where groups are of one size, else at once."""
    own = group_of(wire.rank, groups)
    size, place = len(own), own.index(wire.rank)
    if size == 1 or len(groups) == 1 or any(len(group) != size for group in groups):
        await wire.all_reduce_(flat)
    else:
        near = wire.group(own)
        strips = flat.new_zeros((size, -(-flat.numel() // size)))
        strips.view(-1)[: flat.numel()] = flat
        strip = strips[0].clone()
        await near.reduce_scatter(strips.view(-1), strip)
        await wire.group([group[place] for group in groups]).all_reduce_(strip)
        await near.all_gather(strip, strips.view(-1))
        flat.copy_(strips.view(-1)[: flat.numel()])
    flat.div_(wire.world_size)
