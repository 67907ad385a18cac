"""DiLoCo: many local steps, then an outer Nesterov step on what they changed, all at once or in fragments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.compress.codec import Codec, Dense, Largest
from thinwire.compress.payload import ChangePayload
from thinwire.errors import check
from thinwire.strategies.base import Bucket
from thinwire.strategies.local.base import LocalState, LocalStrategy, Outer
from thinwire.strategies.local.fragments import Fragments, Pattern, check_fragments
from thinwire.strategies.settings import check_types
from thinwire.topology import Schedule
from thinwire.wire.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class DiLoCo(LocalStrategy):
    """Make `interval` steps alone; then the mean of what they changed is the gradient of an outer step.

    The inner optimizer keeps its state, which is never sent. With fragments, parts of the model are
    synchronized in turn (Streaming DiLoCo).

    Reference: Douillard et al., DiLoCo, 2023, arXiv:2311.08105, and Streaming DiLoCo with overlapping
    communication, 2025, arXiv:2501.18512; with `gossip`, Kolehmainen et al., NoLoCo, 2025, arXiv:2506.10911.
    """

    interval: int = 50
    """Steps between two outer steps of a parameter."""
    outer_lr: float | Literal["auto"] = "auto"
    """Of the outer step; "auto": what was best for this number of workers (Charles et al., 2025)."""
    outer_momentum: float = 0.9
    """Of the outer step."""
    fragments: int = 1
    """Parts of the model that are synchronized in turn."""
    pattern: Pattern = "strided"
    """What a fragment is: pieces from all over the model ("strided"), or one piece ("sequential")."""
    delay: int = 0
    """Steps that a fragment may take to come back; 0: training waits for it."""
    payload: ChangePayload = "fp32"
    """How changes look on the wire: "fp32" (as they are), "bf16", "int8" or "int4"; rounding errors are
    sent later."""
    density: float = 1.0
    """Part of the changes that is sent, the largest; then values have 8 bits."""
    gossip: bool = False
    """Average with one peer, another one each time, instead of with all (NoLoCo): anchors differ then,
    and are averaged too."""

    def __post_init__(self) -> None:
        check_types(self)
        check_fragments("DiLoCo", self.interval, self.fragments, self.delay)
        valid = self.outer_lr == "auto" or self.outer_lr > 0
        check(valid, "DiLoCo.outer_lr", "a positive number, or 'auto'", self.outer_lr)
        check(
            0 <= self.outer_momentum < 1,
            "DiLoCo.outer_momentum",
            "0 or more and below 1",
            self.outer_momentum,
        )
        check(0 < self.density <= 1, "DiLoCo.density", "above 0 and at most 1", self.density)
        plain = not self.gossip or (self.payload == "fp32" and self.density == 1)
        check(plain, "DiLoCo.gossip", "False with a payload or density that rounds", self.gossip)

    @property
    def period(self) -> int:
        return self.interval

    @property
    def codec(self) -> Codec | None:
        if self.density < 1:
            return Largest.of(self.density)
        return None if self.payload == "fp32" else Dense(self.payload)

    def cut(self, numels: Sequence[int]) -> Fragments:
        return Fragments(numels, self.fragments, self.pattern)

    async def share_(self, moved: Tensor, bucket: Bucket, start: int, state: LocalState, wire: Wire) -> None:
        if not self.gossip:
            await LocalStrategy.share_(self, moved, bucket, start, state, wire)
            return
        anchor = state.anchors[bucket.index][start : start + moved.numel()]
        peers = Schedule("dissemination", wire.world_size, seed=0).peers(
            wire.rank, bucket.step // self.interval
        )
        ours = torch.cat([moved, anchor])
        theirs = torch.empty_like(ours)
        await wire.exchange(send=ours, to=peers.to, recv=theirs, source=peers.source, tag=bucket.index)
        their_moved, their_anchor = theirs.chunk(2)
        moved.lerp_(their_moved, 0.5)
        anchor.lerp_(their_anchor, 0.5)  # not by the outer step, whose momentum would make it overshoot

    def outer(self, world_size: int) -> Outer:
        rate = outer_rate(world_size) if self.outer_lr == "auto" else self.outer_lr
        return Outer(rate, self.outer_momentum)


def outer_rate(world_size: int) -> float:
    """The outer rate that was best for so many workers, at a momentum of 0.9.

    Charles et al., Scaling Laws for DiLoCo, 2025, arXiv:2503.09799: 0.4 to 0.6 for one worker, 0.6 for two,
    0.6 to 0.8 for four and 0.8 to 1.0 for eight, whatever the size of the model.

    >>> [outer_rate(world_size) for world_size in (1, 2, 4, 8, 64)]
    [0.5, 0.6, 0.7, 0.9, 1.0]
    """
    return {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.9}.get(1 << (min(world_size, 16).bit_length() - 1), 1.0)
