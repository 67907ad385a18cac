"""Small strategies, one of each kind that the seam must carry; none is longer than 40 lines."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from thinwire import Bucket, Strategy, Wire, Work, in_background, training_thread


def later(seconds: float) -> Work:
    """A work that ends after some time, on a thread of its own."""
    work = Work()
    timer = threading.Timer(seconds, work.finish)
    timer.daemon = True
    timer.start()
    return work


@dataclass
class Sums:
    totals: list[Tensor]
    delays_ms: list[tuple[float, ...]] = field(default_factory=list)
    """By bucket and phase."""


@dataclass(frozen=True, kw_only=True)
class Phases(Strategy):
    """Several sums one after another in every bucket, after delays that differ by worker, bucket and phase.

    In phase k worker r adds (bucket + 1) * (r + 1) to the sum of phase k - 1: mixed up numbers show.
    """

    phases: int = 2
    seam: str = "reduce"

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Sums:
        return Sums([torch.zeros(1, dtype=torch.float64) for _ in buckets])

    async def reduce(self, bucket: Bucket, state: Sums, wire: Wire) -> None:
        if self.seam == "reduce":
            await self._sum(bucket, state, wire)

    async def mix(self, bucket: Bucket, state: Sums, wire: Wire) -> None:
        if self.seam == "background":
            await in_background()
        if self.seam != "reduce":
            await self._sum(bucket, state, wire)

    async def _sum(self, bucket: Bucket, state: Sums, wire: Wire) -> None:
        total = state.totals[bucket.index].zero_()
        delays = (*state.delays_ms[bucket.index], *[0.0] * self.phases)
        for delay_ms in delays[: self.phases]:
            if delay_ms:
                await later(delay_ms / 1000)
            total += (bucket.index + 1) * (wire.rank + 1)
            await wire.all_reduce_(total)

    def expected(self, index: int, world_size: int) -> float:
        total = 0.0
        for _ in range(self.phases):
            total = world_size * total + (index + 1) * world_size * (world_size + 1) / 2
        return total


@dataclass(frozen=True, kw_only=True)
class HierarchicalMean(Strategy):
    """Every second step the mean within a pair, every fourth over all, in two stages."""

    async def mix(self, bucket: Bucket, state: Any, wire: Wire) -> None:
        if bucket.step % 2:
            return
        half = wire.world_size // 2
        inside = range(half) if wire.rank < half else range(half, wire.world_size)
        mean = bucket.read()
        await wire.group(list(inside)).all_reduce_(mean)
        mean /= half
        if bucket.step % 4 == 0:
            across = [wire.rank % half, wire.rank % half + half]
            await wire.group(across).all_reduce_(mean)
            mean /= 2
        bucket.write_(mean)


@dataclass
class Centre:
    values: list[Tensor]
    served: list[int]
    """By worker: messages that were handled here."""
    sent: int = 0


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy):
    """Rank 0 keeps a centre and answers whoever comes; nobody waits for anybody (EASGD)."""

    pull: float = 0.3

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Centre:
        return Centre([b.keep("centre", b.read(), on_resize="same") for b in buckets], [0] * wire.world_size)

    async def mix(self, bucket: Bucket, state: Centre, wire: Wire) -> None:
        own = bucket.read()
        state.sent += 1
        await in_background(slack=math.inf)
        centre = await wire.ask(own, to=0, tag=bucket.index)
        await training_thread()
        bucket.add_(own - centre, scale=-self.pull)

    async def serve(self, state: Centre, wire: Wire) -> None:
        if wire.rank == 0:
            async for source, index, theirs in wire.listen(state.values[0]):
                await wire.answer(state.values[index], to=source, tag=index)
                state.values[index].lerp_(theirs, self.pull)
                state.served[source] += 1


Place = Literal["first", "after work", "after background", "twice", "in reduce", "in serve", "in settle"]


@dataclass
class Threads:
    names: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class ComesBack(Strategy):
    """Asks for the training thread in some place, and notes where it then runs."""

    place: Place = "first"

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Threads:
        return Threads()

    async def reduce(self, bucket: Bucket, state: Threads, wire: Wire) -> None:
        if self.place == "in reduce":
            await in_background()
            await self._note(state)

    async def mix(self, bucket: Bucket, state: Threads, wire: Wire) -> None:
        if self.place == "after work":
            await wire.all_reduce_(torch.zeros(1))
            bucket.add_(torch.zeros_like(bucket.read()))  # where a synchronous mix goes on after waiting
        if self.place in ("after background", "twice"):
            await in_background()
            await wire.all_reduce_(torch.zeros(1))
        if self.place in ("first", "after work", "after background", "twice"):
            await self._note(state)
        if self.place == "twice":
            await wire.all_reduce_(torch.zeros(1))
            await in_background()
            await self._note(state)

    async def serve(self, state: Threads, wire: Wire) -> None:
        if self.place == "in serve":
            await self._note(state)

    async def settle(self, buckets: Sequence[Bucket], state: Threads, wire: Wire) -> None:
        if self.place == "in settle":
            await in_background()
            await self._note(state)

    async def _note(self, state: Threads) -> None:
        await training_thread()
        state.names.add(threading.current_thread().name)
