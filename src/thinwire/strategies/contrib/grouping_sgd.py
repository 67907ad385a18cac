"""GroupingSGD: gradients inside groups of equally fast workers; changes of a group, to a centre of all."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from thinwire.errors import check
from thinwire.strategies.base import Bucket, Strategy
from thinwire.strategies.local.groups import Groups
from thinwire.strategies.parts import check_finite, check_real
from thinwire.strategies.settings import check_types
from thinwire.wire.wire import Wire

_log = logging.getLogger("thinwire")


@dataclass(slots=True)
class GroupingState:
    """One worker's state; lists are in the order of buckets."""

    centres: list[Tensor]
    """The centre: of the buckets this worker owns as it is, of others as it was at the last pause."""
    fetched: list[Tensor]
    """The centre as this worker's group last got it."""
    group_of: list[int]
    """By worker: the lowest rank of its group; -1 until speeds were measured."""
    times_s: list[float] = field(init=False, repr=False, default_factory=list)
    """How long this worker computed in each step so far."""
    ended_s: float | None = field(init=False, repr=False, default=None)
    one_group: bool = field(init=False, repr=False, default=True)
    """Whether the step under way began while speeds were measured: what all its buckets go by."""

    def own(self, rank: int) -> list[int]:
        """The ranks of a worker's group; all while speeds are measured."""
        return [other for other, first in enumerate(self.group_of) if first == self.group_of[rank]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupingSGD(Strategy):
    """Exact SGD among workers of similar speed; groups go their own pace and meet in a centre.

    In the first steps all are one group, and each measures how long it computes. Then workers of similar
    speed form groups. Every `interval` steps the first worker of a group adds what the group changed to the
    centre, weighted by the group's part of all workers, and brings the centre back to its group; no group
    waits for another.

    Reference: Jiang et al., Grouping-SGD, CCGrid 2019.
    """

    interval: int = 4
    """Steps between two visits to the centre."""
    similar: float = 1.5
    """Workers whose times differ by less than this factor are of similar speed."""
    measured_steps: int = 10
    """Steps of exact SGD over all workers in which speeds are measured."""

    def __post_init__(self) -> None:
        check_types(self)
        check(self.interval >= 1, "GroupingSGD.interval", "1 or more steps", self.interval)
        check(self.similar > 1, "GroupingSGD.similar", "above 1", self.similar)
        check(self.measured_steps >= 1, "GroupingSGD.measured_steps", "1 or more", self.measured_steps)

    @property
    def period(self) -> int:
        return self.interval

    @property
    def adapts_in(self) -> int:
        return self.measured_steps

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> GroupingState:
        check_real(buckets, "GroupingSGD")
        centres = [
            bucket.keep("centre", bucket.read(), on_resize="same", of_parameters=True) for bucket in buckets
        ]
        fetched = [
            bucket.keep("fetched", bucket.read(), on_resize="mean", of_parameters=True) for bucket in buckets
        ]
        return GroupingState(centres, fetched, [-1] * wire.world_size)

    async def reduce(self, bucket: Bucket, state: GroupingState, wire: Wire) -> None:
        own = state.own(wire.rank)
        last = bucket.index == len(state.centres) - 1
        if last and state.one_group and state.ended_s is not None:
            state.times_s.append(wire.now() - state.ended_s)
        await wire.group(own).all_reduce_(bucket.gradient)
        bucket.gradient.div_(len(own))

    async def mix(self, bucket: Bucket, state: GroupingState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        if bucket.index == 0:
            state.one_group = state.group_of[0] < 0
        if state.one_group:
            if len(state.times_s) >= self.measured_steps:
                await self._group(bucket, state, wire)
            state.ended_s = wire.now()
            return
        if bucket.step % self.interval:
            return
        now, index, own = check_finite(bucket.read(), bucket), bucket.index, state.own(wire.rank)
        centre = now.clone()
        if wire.rank == own[0]:
            changed = (now - state.fetched[index]).mul_(len(own) / wire.world_size)
            centre = await wire.ask(changed, to=index % wire.world_size, tag=index)
        await wire.group(own).broadcast_(centre, source=0)
        state.fetched[index].copy_(centre)
        bucket.add_(centre - now)

    async def serve(self, state: GroupingState, wire: Wire) -> None:
        async for source, index, changed in wire.listen(state.centres[0]):
            await wire.answer(state.centres[index].add_(changed).clone(), to=source, tag=index)

    async def settle(self, buckets: Sequence[Bucket], state: GroupingState, wire: Wire) -> None:
        for index, centre in enumerate(state.centres):  # so that every worker can save it
            await wire.broadcast_(centre, source=index % wire.world_size)

    async def _group(self, bucket: Bucket, state: GroupingState, wire: Wire) -> None:
        """Agree on groups, and begin with the mean model: of workers that were one group, what all have."""
        if bucket.index == 0:  # the coroutine of the first bucket asks, for all of them
            time_s = torch.tensor([median(state.times_s)], dtype=torch.float64)
            times_s = time_s.new_zeros(wire.world_size)
            await wire.all_gather(time_s, times_s)
            groups = by_speed(times_s.tolist(), self.similar)
            if wire.rank == 0:
                _log.info("step %d: groups by speed: %s", bucket.step, groups)
            for group in groups:
                for rank in group:
                    state.group_of[rank] = group[0]
        flat = bucket.read()
        await wire.all_reduce_(flat)
        flat.div_(wire.world_size)
        state.centres[bucket.index].copy_(flat)
        state.fetched[bucket.index].copy_(flat)
        bucket.write_(flat)

    def instruments(self, state: GroupingState) -> Mapping[str, float]:
        return {"groups": len(set(state.group_of))}


def by_speed(times_s: Sequence[float], similar: float) -> Groups:
    """Workers in order of their time; a group ends where one takes `similar` times as long as its fastest.

    >>> by_speed([0.10, 0.21, 0.11, 0.20], similar=1.5)
    [[0, 2], [1, 3]]
    """
    groups: Groups = []
    for rank in sorted(range(len(times_s)), key=lambda rank: times_s[rank]):
        if groups and times_s[rank] < similar * times_s[groups[-1][0]]:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return sorted(sorted(group) for group in groups)
