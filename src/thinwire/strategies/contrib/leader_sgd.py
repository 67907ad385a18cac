"""LeaderSGD: the model of the worker with the lowest training loss, which all others are pulled towards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.errors import check
from thinwire.strategies.base import Bucket, Strategy
from thinwire.strategies.local.groups import Nearness, Neighbours
from thinwire.strategies.parts import check_finite, check_real
from thinwire.strategies.settings import check_types
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work


@dataclass(slots=True)
class LeaderState:
    """One worker's state; lists are in the order of buckets."""

    near: list[Tensor]
    """The last leader of this worker's group."""
    far: list[Tensor]
    """The last leader of all."""
    before: list[Tensor]
    """The parameters that this step began with."""
    score: float = 0.0
    """Sum of this worker's losses since the last meeting."""
    leads: int = 0
    """Meetings that this worker led."""
    neighbours: Neighbours = field(init=False, repr=False)
    elected: Work = field(init=False, repr=False)
    """Ends when all buckets know whom to follow in this step."""
    leader: int = field(init=False, repr=False, default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderSGD(Strategy):
    """Train alone, drawn to the best worker near and the best of all.

    Every `inner_interval` steps the leader of a group sends its model to the group, and every `interval`
    steps the leader of all to everyone: x += pull (leader - x). Between meetings x is drawn on to both in
    every step, by pull / interval. Leaders are the workers whose loss since the last meeting was lowest.

    Reference: Teng et al., Leader Stochastic Gradient Descent for Distributed Training of Deep Learning
    Models, 2019, arXiv:1905.10395.
    """

    inner_interval: int = 4
    """Steps between two meetings of a group."""
    interval: int = 16
    """Steps between two meetings of all; a multiple of `inner_interval`."""
    pull: float = 0.1
    """How far a worker moves towards its leader at a meeting, and once more on the way to the next."""
    groups: Nearness | int = "host"
    """Who is in a group: workers of a host, of a site, as measured, or so many in order of rank."""
    loss: Callable[[], float] | None = field(default=None, repr=False)
    """Gives this worker's loss of the step just made; None: the squared length of the step is taken."""

    def __post_init__(self) -> None:
        check_types(self)
        name, inner = "LeaderSGD", self.inner_interval
        check(self.interval >= 1, f"{name}.interval", "1 or more steps", self.interval)
        divides = inner >= 1 and self.interval % inner == 0
        check(divides, f"{name}.inner_interval", f"a divisor of interval ({self.interval})", inner)
        check(0 < self.pull < 1, f"{name}.pull", "between 0 and 1", self.pull)
        check(self.loss is None or callable(self.loss), f"{name}.loss", "None or a function", self.loss)

    @property
    def period(self) -> int:
        return self.interval

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> LeaderState:
        check_real(buckets, "LeaderSGD")
        near = [bucket.keep("near", bucket.read(), on_resize="mean") for bucket in buckets]
        far = [bucket.keep("far", bucket.read(), on_resize="same") for bucket in buckets]
        before = [bucket.keep("before", bucket.read(), on_resize="mean") for bucket in buckets]
        state = LeaderState(near, far, before)
        state.neighbours = Neighbours(self.groups, "LeaderSGD.groups", wire)
        return state

    async def mix(self, bucket: Bucket, state: LeaderState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        now, index = check_finite(bucket.read(), bucket), bucket.index
        near, far, before = state.near[index], state.far[index], state.before[index]
        if self.loss is None and not now.is_meta:
            state.score += float((now - before).square().sum())
        elif self.loss is not None and index == 0:
            state.score += self.loss()
        moved = (near - now).mul_(self.pull / self.inner_interval)
        moved.add_(far - now, alpha=self.pull / self.interval)
        if bucket.step % self.inner_interval == 0:
            everywhere = bucket.step % self.interval == 0
            group = wire if everywhere else wire.group(await state.neighbours.own(wire))
            followed = far if everywhere else near
            await self._elect(bucket, state, group)
            followed.copy_(now)
            await group.broadcast_(followed, source=state.leader)
            moved.add_(followed - now, alpha=self.pull)
        bucket.add_(moved)
        bucket.read(out=before)

    async def _elect(self, bucket: Bucket, state: LeaderState, group: Wire) -> None:
        """Agree on who leads, once for all buckets of a step: the coroutine of the first one asks."""
        if bucket.index:
            await state.elected
            return
        state.elected = Work()
        score = torch.tensor([state.score], dtype=torch.float64)
        scores = score.new_empty(group.world_size)
        await group.all_gather(score, scores)
        state.leader = int(scores.argmin())
        state.leads += state.leader == group.rank
        state.score = 0.0
        state.elected.finish()

    def instruments(self, state: LeaderState) -> Mapping[str, float]:
        return {"leads": state.leads}
