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

from thinwire.strategies.base import OWN, Bucket, Strategy
from thinwire.strategies.parts import check_finite, check_real
from thinwire.wire.wire import Wire
from thinwire.wire.work import in_background, training_thread


@dataclass(slots=True)
class CentreState:
    """One worker's state; lists are in the order of buckets."""

    centres: list[Tensor]
    """The centre: of the buckets this worker owns as it is, of others as the last answer showed it."""
    fetched: list[Tensor]
    """The answers last got, where a strategy needs them."""
    asked: int = 0
    """Questions to owners that were answered."""
    served: int = 0
    """Questions of others, and of its own, that this worker has answered."""
    skipped: int = 0
    """Turns left out because the last answer was still on its way."""
    counts: list[Tensor] = field(default_factory=list, metadata=OWN)
    """By bucket: how many questions of each worker are in this worker's copy of the centre."""
    answered: list[int] = field(default_factory=list, metadata=OWN)
    """By bucket: answers that this worker has got, in the present world."""
    pending: list[Tensor | None] = field(default_factory=list, metadata=OWN)
    """By bucket: the question under way."""
    base: int = field(default=0, metadata=OWN)
    """Number that versions of the centre have when the present world begins."""
    rank: int = field(default=-1, metadata=OWN)
    """In the present world; -1 before it has made a step or answered."""


class CentreStrategy(Strategy):
    """Everything that strategies with a centre have in common.

    Every worker is a second holder of the centre: an answer shows it, so a copy costs no message. When an
    elastic world changes, the newest copy of each bucket becomes the centre. What was answered to a worker
    that is left is in it, however many have died, the owner too.
    """

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

    @abstractmethod
    def centre_after(self, question: Tensor, answer: Tensor, world_size: int) -> Tensor:
        """The owner's centre right after this answer."""

    def counted(self, question: Tensor, index: int, state: CentreState) -> None:
        """The centre has a question of this worker whose answer never came: do not ask the same again."""
        return

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
        self._begin(state, wire)
        return state

    def _begin(self, state: CentreState, wire: Wire) -> None:
        """Count from here on, in this world."""
        number = len(state.centres)
        state.counts = [torch.zeros(wire.world_size, dtype=torch.int64) for _ in range(number)]
        state.answered, state.pending = [0] * number, [None] * number

    async def mix(self, bucket: Bucket, state: CentreState, wire: Wire) -> None:
        index, world_size = bucket.index, wire.world_size
        state.rank = wire.rank
        if world_size == 1 or bucket.step % self.interval:
            return
        now = check_finite(bucket.read(), bucket)
        if state.pending[index] is not None:
            state.skipped += 1
            return
        state.pending[index] = question = self.question(now, index, state)
        owner, message = index % world_size, question.view(torch.uint8)
        await in_background(slack=math.inf)
        like = message.new_empty(message.numel() + _counts_bytes(world_size))
        answer, counts = _split(await wire.ask(message, to=owner, tag=index, like=like), message.numel())
        await training_thread()
        shown = answer.view(now.dtype)
        if owner != wire.rank:
            state.centres[index].copy_(self.centre_after(question, shown, world_size))
            state.counts[index].copy_(counts)
        bucket.add_(self.move(now, shown, index, state, world_size))
        state.asked += 1
        state.answered[index] += 1
        state.pending[index] = None

    async def serve(self, state: CentreState, wire: Wire) -> None:
        like = state.centres[0].view(torch.uint8)  # buckets have dtypes of their own
        async for source, index, question in wire.listen(like):
            state.rank = wire.rank
            centre, counts = state.centres[index], state.counts[index]
            answer = self.answer(question.view(centre.dtype), centre, wire.world_size)
            counts[source] += 1
            state.served += 1
            told = counts.to(answer.device).view(torch.uint8)
            await wire.answer(torch.cat([answer.view(torch.uint8), told]), to=source, tag=index)

    async def settle(self, buckets: Sequence[Bucket], state: CentreState, wire: Wire) -> None:
        for index, centre in enumerate(state.centres):  # so that every worker can save it
            await wire.broadcast_(centre, source=index % wire.world_size)

    async def recover(self, buckets: Sequence[Bucket], state: CentreState, wire: Wire) -> None:
        """The newest copy of each bucket of the centre becomes everybody's; whoever joins begins there."""
        joins = state.rank < 0
        versions = [-1 if joins else state.base + int(counts.sum()) for counts in state.counts]
        mine = torch.tensor([state.base, state.counts[0].numel(), *versions])
        told = torch.empty(wire.world_size * mine.numel(), dtype=torch.int64)
        await wire.all_gather(mine, told)
        bases, sizes, *columns = told.view(wire.world_size, -1).T
        for index, (bucket, newest) in enumerate(zip(buckets, columns, strict=True)):
            source = int(newest.argmax())
            counts = torch.zeros(int(sizes[source]), dtype=torch.int64)
            if source == wire.rank:
                counts.copy_(state.counts[index])
            await wire.broadcast_(state.centres[index], source=source)
            await wire.broadcast_(counts, source=source)
            pending = None if joins else state.pending[index]
            if joins:
                bucket.write_(state.centres[index])
                state.fetched[index].copy_(state.centres[index])
                continue
            same_world = state.base == int(bases[source])
            if pending is not None and same_world and int(counts[state.rank]) > state.answered[index]:
                self.counted(pending, index, state)
        state.base, state.rank = 1 + max(int(column.max()) for column in columns), wire.rank
        self._begin(state, wire)

    def instruments(self, state: CentreState) -> Mapping[str, float]:
        return {"asked": state.asked, "served": state.served, "skipped": state.skipped}


def _counts_bytes(world_size: int) -> int:
    return 8 * world_size


def _split(message: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    """The centre, and how many questions of each worker are in it."""
    counts = message[num_bytes:]
    if counts.is_meta:  # sizes alone, without numbers
        return message[:num_bytes], torch.zeros(counts.numel() // 8, dtype=torch.int64)
    return message[:num_bytes], counts.cpu().clone().view(torch.int64)
