"""DiLoCo: many local steps, then an outer Nesterov step on what they changed, all at once or in fragments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.compress.codec import Codec, codec_of
from thinwire.compress.payload import ChangePayload
from thinwire.errors import check
from thinwire.strategies.base import Bucket, Seam
from thinwire.strategies.local.among import Everyone, OnePeer
from thinwire.strategies.local.base import LocalState, LocalStrategy, Merge, Outer
from thinwire.strategies.local.fragments import Fragments, Pattern, check_fragments
from thinwire.strategies.local.quorum import Quorum, Rounds
from thinwire.strategies.measured import worst
from thinwire.strategies.settings import check_types
from thinwire.wire.wire import Wire

LONG = 10_000
"""Fewest steps of a training that is known here to come near exact SGD."""


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
    """Learning rate of the outer step; "auto": the best for this number of workers (Charles et al., 2025)."""
    outer_momentum: float = 0.9
    """Momentum of the outer step."""
    fragments: int = 1
    """Parts of the model that are synchronized in turn."""
    pattern: Pattern = "strided"
    """What a fragment is: pieces from all over the model ("strided"), or one piece ("sequential")."""
    delay: int = 0
    """Steps that a fragment may take to come back; 0: training waits for it."""
    payload: ChangePayload = "fp32"
    """How changes look on the wire: "fp32" (as they are), "bf16", "int8", "int4" or "sign" (one
    bit); rounding errors count the next time."""
    density: float = 1.0
    """Part of the changes that is sent, the largest; then values have 8 bits."""
    gossip: bool = False
    """Average with one peer, another one each time, instead of with all (NoLoCo): anchors differ then,
    and are averaged too."""

    merge: Merge = "equal"
    """How much a worker counts: "equal", or by its "samples" since the last time, which `link.weight` is told
    in every step (samples or tokens; a step counts 1 if nothing is)."""
    offload: bool = False
    """Keep the outer state (anchor, velocity, what was not sent) in the memory of the CPU."""
    quorum: float = 1.0
    """Part of the workers that an outer step waits for. Below 1 it goes on without late ones, whose changes
    count in the next; the outer state is on the CPU then."""
    grace: float = 10.0
    """Seconds that it waits for the others once a quorum is there."""

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
        check(0 < self.quorum <= 1, "DiLoCo.quorum", "above 0 and at most 1", self.quorum)
        check(self.grace >= 0, "DiLoCo.grace", "0 or more seconds", self.grace)
        plain = self.quorum == 1 or (self.payload == "fp32" and self.density == 1 and not self.gossip)
        check(plain, "DiLoCo.quorum", "1 with gossip, a payload or a density", self.quorum)
        equal = not self.gossip or self.merge == "equal"
        check(equal, "DiLoCo.merge", "'equal' with gossip", self.merge)

    @property
    def period(self) -> int:
        return self.interval

    @property
    def codec(self) -> Codec | None:
        exact = self.payload == "fp32" and self.density == 1
        return None if exact else codec_of(self.payload, self.density)

    def cut(self, numels: Sequence[int]) -> Fragments:
        return Fragments(numels, self.fragments, self.pattern)

    @property
    def among(self) -> Everyone | OnePeer | Quorum:
        if self.quorum < 1:
            return Quorum(self.quorum, self.grace)
        return OnePeer(self.interval) if self.gossip else Everyone()

    @property
    def on_cpu(self) -> bool:
        return self.offload or self.quorum < 1

    def uses(self, seam: Seam) -> bool:
        return seam not in ("serve", "settle") or self.quorum < 1

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> LocalState:
        state = LocalStrategy.init(self, buckets, wire)
        if self.quorum < 1:
            state.rounds = Rounds.of(state)
        return state

    async def serve(self, state: LocalState, wire: Wire) -> None:
        assert isinstance(self.among, Quorum), "others have nothing to answer"
        await self.among.serve(state, wire)

    async def settle(self, buckets: Sequence[Bucket], state: LocalState, wire: Wire) -> None:
        assert isinstance(self.among, Quorum), "others leave nothing open"
        await self.among.settle(buckets, state, wire)

    def instruments(self, state: LocalState) -> Mapping[str, float]:
        told = LocalStrategy.instruments(self, state)
        return {**told, "late_rounds": state.rounds.late} if self.quorum < 1 else told

    def advice(self, num_steps: int | None, world_size: int) -> str:
        if num_steps is None or num_steps >= LONG or world_size == 1:
            return ""
        lost = " and ".join(map(str, worst("diloco")))
        return (
            f"DiLoCo was made for long trainings (its paper: 88,000 steps) and may lose much in {num_steps:,}"
            f" steps: it has lost {lost}; see docs/diloco.md, 'What it costs in accuracy'"
        )

    def outer(self, world_size: int, normalised: bool) -> Outer:
        rate = outer_rate(world_size) if self.outer_lr == "auto" else self.outer_lr
        return Outer(rate, self.outer_momentum)


def outer_rate(world_size: int) -> float:
    """The outer rate that was best for this number of workers, at a momentum of 0.9.

    Charles et al., Scaling Laws for DiLoCo, 2025, arXiv:2503.09799: 0.4 to 0.6 for one worker, 0.6 for two,
    0.6 to 0.8 for four and 0.8 to 1.0 for eight, whatever the size of the model.

    >>> [outer_rate(world_size) for world_size in (1, 2, 4, 8, 64)]
    [0.5, 0.6, 0.7, 0.9, 1.0]
    """
    return {1: 0.5, 2: 0.6, 4: 0.7, 8: 0.9}.get(1 << (min(world_size, 16).bit_length() - 1), 1.0)
