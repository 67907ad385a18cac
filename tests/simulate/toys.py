"""Small strategies for the clock: an exchange beside training, a tree of exchanges, a mean now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import Bucket, Strategy, Wire, in_background, training_thread


@dataclass(frozen=True, kw_only=True, slots=True)
class Gossip(Strategy):
    """Mix with one peer after every step; back before the next one, or up to `slack` steps after it."""

    slack: float = 0

    async def mix(self, bucket: Bucket, state: Any, wire: Wire) -> None:
        hop = 2 ** ((bucket.step - 1) % max(1, (wire.world_size - 1).bit_length()))
        tag = 1000 * bucket.step + bucket.index
        sent = bucket.read()
        inbox = torch.empty_like(sent)
        await in_background(slack=self.slack)
        to, source = (wire.rank + hop) % wire.world_size, (wire.rank - hop) % wire.world_size
        await wire.exchange(send=sent, to=to, recv=inbox, source=source, tag=tag)
        await training_thread()
        bucket.add_(inbox - sent, scale=0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeTopK(Strategy):
    """Send the k largest up a tree and back: several rounds of exchanges inside `reduce`."""

    density: float = 0.05

    @property
    def replicas_agree(self) -> bool:
        return True

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> list[Tensor]:
        return [bucket.zeros("residual", on_resize="sum", part="large") for bucket in buckets]

    async def reduce(self, bucket: Bucket, state: list[Tensor], wire: Wire) -> None:
        large, tag = bucket.gradient[: bucket.exact_from], 2 * bucket.index
        exact = wire.all_reduce_(bucket.gradient[bucket.exact_from :])
        await in_background()
        residual = state[bucket.index].add_(large)
        k = max(1, int(self.density * len(large)))
        index = residual.abs().topk(k).indices
        pairs = torch.stack([index.double(), residual[index].double()])
        residual[index] = 0
        hops = [2**n for n in range((wire.world_size - 1).bit_length())]
        for hop in hops:
            if wire.rank % (2 * hop) == hop:
                await wire.exchange(send=pairs, to=wire.rank - hop, tag=tag)
            elif wire.rank % (2 * hop) == 0 and wire.rank + hop < wire.world_size:
                inbox = torch.empty_like(pairs)
                await wire.exchange(recv=inbox, source=wire.rank + hop, tag=tag)
                pairs = _merge(pairs, inbox, k, len(large))
        for hop in reversed(hops):  # and down again
            if wire.rank % (2 * hop) == hop:
                await wire.exchange(recv=pairs, source=wire.rank - hop, tag=tag + 1)
            elif wire.rank % (2 * hop) == 0 and wire.rank + hop < wire.world_size:
                await wire.exchange(send=pairs, to=wire.rank + hop, tag=tag + 1)
        await exact
        large.zero_()[pairs[0].long()] = pairs[1].to(large.dtype)
        bucket.gradient.div_(wire.world_size)


def _merge(ours: Tensor, theirs: Tensor, k: int, numel: int) -> Tensor:
    """The k largest of the sum."""
    total = torch.zeros(numel, dtype=torch.float64)
    for index, value in (ours, theirs):
        total.index_add_(0, index.long(), value)
    chosen = total.abs().topk(k).indices.sort().values
    return torch.stack([chosen.double(), total[chosen]])


@dataclass(frozen=True, kw_only=True, slots=True)
class EveryFew(Strategy):
    """Local steps, and every few of them the mean of all changes since the last time."""

    interval: int = 4

    @property
    def period(self) -> int:
        return self.interval

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> list[Tensor]:
        return [bucket.keep("anchor", bucket.read(), on_resize="same") for bucket in buckets]

    async def mix(self, bucket: Bucket, state: list[Tensor], wire: Wire) -> None:
        if bucket.step % self.interval:
            return
        anchor = state[bucket.index]
        moved = bucket.read() - anchor
        await wire.all_reduce_(moved)
        anchor.add_(moved, alpha=1 / wire.world_size)
        bucket.write_(anchor)
