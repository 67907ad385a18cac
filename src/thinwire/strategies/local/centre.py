"""CentreStrategy: workers talk to a centre whenever they want to, and nobody waits for anybody.

The centre is dealt out over the workers by buckets: each answers for its part beside its own training. A
worker that has not got its answer yet leaves out its turn.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.strategies.base import Bucket, Strategy
from thinwire.strategies.parts import check_finite, check_real
from thinwire.wire.wire import Wire
from thinwire.wire.work import in_background, training_thread


@dataclass(slots=True)
class CentreState:
    """One worker's state; lists are in the order of buckets."""

    centres: list[Tensor]
    """The centre: of the buckets this worker owns as it is, of others as it was at the last pause."""
    fetched: list[Tensor]
    """The answers last got, where a strategy needs them."""
    asked: int = 0
    """Questions to owners that were answered."""
    served: int = 0
    """Questions of others, and of its own, that this worker has answered."""
    skipped: int = 0
    """Turns left out because the last answer was still on its way."""
    waiting: list[bool] = field(init=False, repr=False)


class CentreStrategy(Strategy):
    """Everything that strategies with a centre have in common."""

    interval: int

    # -- what each of them says ---------------------------------------------------------------------

    @abstractmethod
    def question(self, now: Tensor, index: int, state: CentreState) -> Tensor:
        """What a worker with these parameters sends to the owner of a bucket."""

    @abstractmethod
    def answer(self, question: Tensor, centre: Tensor, world_size: int) -> Tensor:
        """What the owner answers; it changes the centre."""

    @abstractmethod
    def move(self, now: Tensor, answer: Tensor, index: int, state: CentreState, world_size: int) -> Tensor:
        """What the worker adds to its parameters, which were `now` when it asked."""

    # -- the protocol -------------------------------------------------------------------------------

    @property
    def period(self) -> int:
        return self.interval

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> CentreState:
        check_real(buckets, type(self).__name__)
        centres = [
            bucket.keep("centre", bucket.read(), on_resize="same", of_parameters=True) for bucket in buckets
        ]
        fetched = [
            bucket.keep("fetched", bucket.read(), on_resize="mean", of_parameters=True) for bucket in buckets
        ]
        state = CentreState(centres, fetched)
        state.waiting = [False] * len(buckets)
        return state

    async def mix(self, bucket: Bucket, state: CentreState, wire: Wire) -> None:
        index, world_size = bucket.index, wire.world_size
        if world_size == 1 or bucket.step % self.interval:
            return
        now = check_finite(bucket.read(), bucket)
        if state.waiting[index]:
            state.skipped += 1
            return
        state.waiting[index] = True
        question = self.question(now, index, state)
        await in_background(slack=math.inf)
        answer = await wire.ask(question.view(torch.uint8), to=index % world_size, tag=index)
        await training_thread()
        bucket.add_(self.move(now, answer.view(now.dtype), index, state, world_size))
        state.asked += 1
        state.waiting[index] = False

    async def serve(self, state: CentreState, wire: Wire) -> None:
        like = state.centres[0].view(torch.uint8)  # buckets have dtypes of their own
        async for source, index, question in wire.listen(like):
            centre = state.centres[index]
            answer = self.answer(question.view(centre.dtype), centre, wire.world_size)
            state.served += 1
            await wire.answer(answer.view(torch.uint8), to=source, tag=index)

    async def settle(self, buckets: Sequence[Bucket], state: CentreState, wire: Wire) -> None:
        for index, centre in enumerate(state.centres):  # so that every worker can save it
            await wire.broadcast_(centre, source=index % wire.world_size)

    def instruments(self, state: CentreState) -> Mapping[str, float]:
        return {"asked": state.asked, "served": state.served, "skipped": state.skipped}
