"""Small strategies, one of each family that is to come: the seam must hold for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.strategies.base import Bucket, Gradients, Parameters, Strategy
from thinwire.wire.base import Wire, any_of, land, take_off


@dataclass
class Counts:
    rounds: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(Strategy):
    """Mix with one peer after every step; landed before the next one, or up to `late` steps after it."""

    late: float = 0

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Counts:
        return Counts([0] * len(buckets))

    async def mix(self, bucket: Parameters, state: Counts, wire: Wire) -> None:
        number = state.rounds[bucket.index]
        state.rounds[bucket.index] += 1
        hop = 2 ** (number % max(1, (wire.world_size - 1).bit_length()))
        sent = bucket.read()
        inbox = torch.empty_like(sent)
        await take_off(after=1, late=self.late)
        to, source = (wire.rank + hop) % wire.world_size, (wire.rank - hop) % wire.world_size
        tag = 1000 * number + bucket.index
        await wire.exchange(send=sent, to=to, recv=inbox, source=source, tag=tag)
        await land()
        bucket.add_(inbox - sent, scale=0.5)


@dataclass
class Residuals:
    kept: list[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeTopK(Strategy):
    """Send the k largest up a tree and back: several rounds of exchanges inside `reduce`."""

    density: float = 0.05

    @property
    def replicas_agree(self) -> bool:
        return True

    @property
    def conserved(self) -> tuple[str, ...]:
        return ("kept",)

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Residuals:
        return Residuals([torch.zeros(b.exact_from, dtype=b.gradient.dtype) for b in buckets])

    async def reduce(self, bucket: Gradients, state: Residuals, wire: Wire) -> None:
        cut, tag = bucket.exact_from, 10 * bucket.index
        exact = wire.all_reduce_(bucket.gradient[cut:])
        await take_off()
        kept = state.kept[bucket.index]
        kept += bucket.gradient[:cut]
        k = max(1, int(self.density * cut))
        index = kept.abs().topk(k).indices
        pairs = torch.stack([index.double(), kept[index].double()])
        kept[index] = 0
        hop = 1
        while hop < wire.world_size:
            if wire.rank % (2 * hop) == hop:
                await wire.exchange(send=pairs, to=wire.rank - hop, tag=tag)
            elif wire.rank % (2 * hop) == 0 and wire.rank + hop < wire.world_size:
                inbox = torch.empty_like(pairs)
                await wire.exchange(recv=inbox, source=wire.rank + hop, tag=tag)
                total = torch.zeros(cut, dtype=torch.float64)
                for each in (pairs, inbox):
                    total.index_add_(0, each[0].long(), each[1])
                chosen = total.abs().topk(k).indices.sort().values
                pairs = torch.stack([chosen.double(), total[chosen]])
            hop *= 2
        while hop > 1:  # and down again
            hop //= 2
            if wire.rank % (2 * hop) == 0 and wire.rank + hop < wire.world_size:
                await wire.exchange(send=pairs, to=wire.rank + hop, tag=tag + 1)
            elif wire.rank % (2 * hop) == hop:
                pairs = torch.empty_like(pairs)
                await wire.exchange(recv=pairs, source=wire.rank - hop, tag=tag + 1)
        await exact
        bucket.gradient[:cut].zero_()[pairs[0].long()] = pairs[1].to(bucket.gradient.dtype)
        bucket.gradient.div_(wire.world_size)


@dataclass
class Anchors:
    anchor: list[Tensor]
    steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EveryFew(Strategy):
    """Local steps, and every few of them the mean of all."""

    interval: int = 4

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Anchors:
        return Anchors([b.read() for b in buckets])

    async def mix(self, bucket: Parameters, state: Anchors, wire: Wire) -> None:
        state.steps += bucket.index == 0
        if state.steps % self.interval:
            return
        moved = bucket.read().sub_(state.anchor[bucket.index])
        await wire.all_reduce_(moved)
        state.anchor[bucket.index].add_(moved, alpha=1 / wire.world_size)
        bucket.write_(state.anchor[bucket.index])


@dataclass
class Centres:
    centre: list[Tensor]
    answered: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Elastic(Strategy):
    """Worker 0 keeps a centre and answers whoever comes; nobody waits for anybody."""

    pull: float = 0.3

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Centres:
        return Centres([b.read() for b in buckets])

    async def mix(self, bucket: Parameters, state: Centres, wire: Wire) -> None:
        own, index = bucket.read(), bucket.index
        if wire.rank == 0:
            bucket.add_(own - state.centre[index], scale=-self.pull)
            state.centre[index] += self.pull * (own - state.centre[index])
            return
        centre = torch.empty_like(own)
        await take_off(after=1, late=math.inf)
        wire.exchange(send=own, to=0, tag=2 * index)
        await wire.exchange(recv=centre, source=0, tag=2 * index + 1)
        await land()
        bucket.add_(own - centre, scale=-self.pull)

    async def serve(self, state: Centres, wire: Wire) -> None:
        if wire.rank != 0:
            return
        sources = [(rank, index) for rank in range(1, wire.world_size) for index in range(len(state.centre))]
        boxes: list[Any] = [torch.empty_like(state.centre[index]) for _, index in sources]

        def post(number: int) -> Any:
            rank, index = sources[number]
            return wire.exchange(recv=boxes[number], source=rank, tag=2 * index)

        works = [post(number) for number in range(len(sources))]
        while works:
            first = await any_of(works)
            rank, index = sources[first]
            centre = state.centre[index]
            await wire.exchange(send=centre.clone(), to=rank, tag=2 * index + 1)
            centre += self.pull * (boxes[first] - centre)
            state.answered += 1
            works[first] = post(first)
