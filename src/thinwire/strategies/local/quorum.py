"""Quorum: rounds that go on without late workers. Every part of the model has an owner who keeps its rounds.

A worker whose part is due sends the owner what it has changed, its offer, and waits until the round is over:
all workers have come, or a quorum of them and then a grace period. The owner takes the mean of the offers,
makes the outer step, and answers with the new anchor; so anchors are one sequence of versions, made in one
place. Whoever comes to a round that is over is answered at once with the newest anchor. Its offer is in the
round then open; until an answer has a version that counts it, the worker keeps its changes as its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.strategies.local.among import Due
from thinwire.strategies.local.progress import SampleProgress, Weight
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, all_of

if TYPE_CHECKING:
    from thinwire.strategies.base import Bucket
    from thinwire.strategies.local.base import LocalState, Outer

_TAIL = 2
"""Numbers after an offer: how much it counts, and none. After an anchor: its version, and whether that has
the offer which it answers."""


@dataclass(slots=True)
class Offers:
    """What a worker has offered of one part, and does not know to be counted."""

    data: Tensor | None = None
    landed: int = 0
    """The round that has it."""

    def take(self, version: int) -> Tensor | None:
        """The offers that an anchor of this version has, if any; they are no longer the worker's own."""
        if self.data is None or version < self.landed:
            return None
        counted, self.data = self.data, None
        return counted

    def add(self, moved: Tensor, landed: int) -> None:
        """All that is not counted is in the same round: an earlier one would have been over by now."""
        self.data = moved if self.data is None else self.data + moved
        self.landed = landed


@dataclass(slots=True)
class QuorumRound:
    """The open round of one part, at its owner."""

    anchor: Tensor
    velocity: Tensor | None
    came: list[int]
    """By worker: rounds it has come to."""
    number: int = 1
    total: Tensor | None = None
    """Offers so far, each by how much it counts."""
    weight: float = 0.0
    waiting: list[int] = field(default_factory=list)
    grace: Work | None = None
    """Ends with the grace period, which has begun if there is one."""

    @property
    def present(self) -> int:
        """How many have come to this round."""
        return sum(number >= self.number for number in self.came)

    def add(self, source: int, moved: Tensor, weight: float) -> bool:
        """Take an offer; gives whether its sender has come to the open round, or to one that is over."""
        self.came[source] += 1
        if weight > 0:
            moved = moved * weight
            self.total = moved if self.total is None else self.total.add_(moved)
            self.weight += weight
        return self.came[source] == self.number

    def close(self, outer: Outer) -> list[int]:
        """Make the outer step, and open the next round; gives who waits for the answer."""
        if self.total is not None:
            outer.step_(self.anchor, self.total.div_(self.weight), self.velocity)
        grace, self.grace = self.grace, None
        if grace is not None:
            grace.finish()
        waiting, self.waiting = self.waiting, []
        self.number, self.total, self.weight = self.number + 1, None, 0.0
        return waiting


@dataclass(slots=True)
class Rounds:
    """All parts, each with a tag by which its messages are known."""

    tags: dict[tuple[int, int], int]
    """By bucket and where a part begins in it."""
    spans: list[tuple[int, int, int]]
    """By tag: bucket, and from where to where."""
    offers: list[Offers]
    open: dict[int, QuorumRound] = field(default_factory=dict)
    """By tag, where this worker is the owner."""
    late: int = 0
    """Rounds that this worker was too late for."""

    @classmethod
    def of(cls, state: LocalState) -> Rounds:
        spans = []
        for bucket in range(len(state.anchors)):
            for turn in sorted(set(state.fragments.turns(state.interval))):
                due = state.fragments.due(bucket, turn, state.interval)
                spans += [(bucket, start, stop) for start, stop in due]
        tags = {(bucket, start): tag for tag, (bucket, start, _) in enumerate(spans)}
        return cls(tags, spans, [Offers() for _ in spans])


@dataclass(frozen=True, slots=True)
class Quorum:
    """Whoever is there, once enough are."""

    quorum: float
    """Part of the workers that a round waits for."""
    grace_s: float
    """Seconds that it then waits for the others."""

    def weigh(self, progress: SampleProgress | None, wire: Wire) -> Weight:
        return Weight(1.0 if progress is None else progress.own)

    async def meet(self, part: Due, state: LocalState, wire: Wire) -> Tensor:
        rounds = state.rounds
        tag = rounds.tags[part.bucket, part.start]
        offers = rounds.offers[tag]
        moved = part.now - part.anchor
        if offers.data is not None:
            moved -= offers.data
        answer = await wire.ask(_message(moved, part.scale, 0.0), to=tag % wire.world_size, tag=tag)
        anchor, version, counts = _read(answer, part.anchor)
        offers.take(int(version))
        if not counts:
            rounds.late += 1
            offers.add(moved, int(version) + 1)
        part.anchor.copy_(anchor)
        return anchor if offers.data is None else anchor + offers.data

    async def serve(self, state: LocalState, wire: Wire) -> None:
        """Keep the rounds of the parts that this worker owns."""
        rounds, num_parts = state.rounds, len(state.rounds.spans)
        like = torch.empty(0, dtype=torch.uint8, device="meta" if state.anchors[0].is_meta else "cpu")
        async for source, tag, message in wire.listen(like):
            round_ = self._round(tag % num_parts, state, wire)
            if tag >= num_parts:  # from itself: a grace period is over, if that round still is not
                if round_.grace is None or not round_.grace.done():
                    continue
            else:
                moved, weight, _ = _read(message, round_.anchor)
                if round_.add(source, moved, weight):
                    round_.waiting.append(source)
                else:
                    await wire.answer(_message(round_.anchor, round_.number - 1, 0.0), to=source, tag=tag)
                if round_.present < wire.world_size:
                    self._begin_grace(round_, tag, rounds, wire)
                    continue
            tag %= num_parts
            waiting = round_.close(state.outer)
            answer = _message(round_.anchor, round_.number - 1, 1.0)
            await all_of([wire.answer(answer, to=worker, tag=tag) for worker in waiting])

    def _round(self, tag: int, state: LocalState, wire: Wire) -> QuorumRound:
        rounds = state.rounds
        if tag not in rounds.open:
            bucket, start, stop = rounds.spans[tag]
            velocity = state.velocities[bucket][start:stop] if state.velocities else None
            anchor = state.anchors[bucket][start:stop].clone()  # the worker's own may be an older one
            rounds.open[tag] = QuorumRound(anchor, velocity, [0] * wire.world_size)
        return rounds.open[tag]

    def _begin_grace(self, round_: QuorumRound, tag: int, rounds: Rounds, wire: Wire) -> None:
        enough = math.ceil(round(self.quorum * wire.world_size, 6))  # 0.7 of 10 are 7
        if round_.grace is None and round_.present >= enough:
            grace = round_.grace = wire.sleep(self.grace_s)
            news, to = torch.zeros(0, dtype=torch.uint8), wire.rank
            grace.when_done(
                lambda: wire.send(news, to=to, tag=tag + len(rounds.spans)) if round_.grace is grace else None
            )

    async def settle(self, buckets: Sequence[Bucket], state: LocalState, wire: Wire) -> None:
        """Give all workers the newest anchor; offers that no round has counted are their worker's again."""
        rounds = state.rounds
        for tag, (index, start, stop) in enumerate(rounds.spans):
            anchor = state.anchors[index][start:stop]
            velocity = state.velocities[index][start:stop] if state.velocities else anchor[:0]
            round_ = self._round(tag, state, wire)
            newest = torch.cat([round_.anchor, velocity, anchor.new_tensor([float(round_.number - 1)])])
            await wire.broadcast_(newest, source=tag % wire.world_size)
            size = stop - start
            change = newest[:size] - anchor
            version = 0 if newest.is_meta else int(newest[-1])
            if (counted := rounds.offers[tag].take(version)) is not None:
                change -= counted
            anchor.copy_(newest[:size])
            velocity.copy_(newest[size:-1])
            moved = anchor.new_zeros(buckets[index].num_parameters)
            moved[start:stop] = change
            buckets[index].add_(moved.to(buckets[index].gradient.device))
            rounds.offers[tag] = Offers()
        rounds.open.clear()


def _message(data: Tensor, *tail: float) -> Tensor:
    """Numbers, and a few more after them, as bytes."""
    return torch.cat([data, data.new_tensor(tail)]).view(torch.uint8)


def _read(message: Tensor, like: Tensor) -> tuple[Tensor, float, float]:
    if message.is_meta:
        return like, 1.0, 1.0  # sizes alone: everybody is on time
    data = message.view(like.dtype)
    return data[:-_TAIL], float(data[-2]), float(data[-1])
