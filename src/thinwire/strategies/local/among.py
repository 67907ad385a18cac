"""Among whom changes are shared: everyone, or one peer at a time. `quorum` is a third way, which waits for no
late worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.compress.codec import Codec
from thinwire.strategies.local.progress import SampleProgress, Weight
from thinwire.strategies.local.reduction import encoded_mean_, mean_
from thinwire.topology import Schedule
from thinwire.wire.wire import Wire

if TYPE_CHECKING:
    from thinwire.strategies.local.base import LocalState

SAMPLE_EVERY = 17
"""Steps after which the distance from the mean is measured; prime, so that all fragments have their turn."""


class Due(NamedTuple):
    """A part of a bucket that is due, flat."""

    bucket: int
    start: int
    """Index in the bucket at which the part begins."""
    step: int
    scale: float
    """How much this worker's changes count; 1 where all count the same."""
    now: Tensor
    """The parameters."""
    anchor: Tensor
    velocity: Tensor | None
    backlog: Tensor | None
    """Changes that were sent to this worker, which adds up a region, and not passed on: of the large
    parameters, with which the part begins. None: changes are not encoded."""
    codec: Codec | None = None
    """How changes look on the wire; None: as they are."""


class Among(Protocol):
    """Among whom changes are shared."""

    def weigh(self, progress: SampleProgress | None, wire: Wire) -> Weight:
        """How much this worker counts in this step; asked before anything is waited for."""

    async def meet(self, part: Due, state: LocalState, wire: Wire) -> Tensor:
        """Move the anchor of a part by an outer step; gives the parameters to go on from."""


@dataclass(frozen=True, slots=True)
class Everyone:
    """The mean over all workers, the same bits on all; small tensors travel as they are.

    What a codec does not show of a worker's changes stays in its own parameters, and so is part of its next
    changes.
    """

    def weigh(self, progress: SampleProgress | None, wire: Wire) -> Weight:
        return Weight(1.0) if progress is None else progress.agree(wire)

    async def meet(self, part: Due, state: LocalState, wire: Wire) -> Tensor:
        moved = part.now - part.anchor
        sampled = part.step % SAMPLE_EVERY == 0 and not moved.is_meta
        own = _square(moved) if sampled else 0.0
        if part.scale != 1:
            moved.mul_(part.scale)
        border = 0 if part.backlog is None else part.backlog.numel()
        if border < moved.numel():
            await mean_(moved[border:], wire)
        kept = moved.new_zeros(0)
        if part.codec is not None and part.backlog is not None and border:
            kept = await encoded_mean_(moved[:border], part.backlog, part.codec, wire)
            kept.mul_(1 / part.scale if part.scale else 0.0)  # of what does not count nothing stays
        if sampled:
            state.note_distance(own - _square(moved), _square(part.anchor))
        state.outer.step_(part.anchor, moved, part.velocity)
        # Going back to the anchor would lose sight of what was not shown: it would be learnt again and again.
        onward = part.anchor.clone() if kept.numel() else part.anchor
        onward[: kept.numel()] += kept
        return onward


@dataclass(frozen=True, slots=True)
class OnePeer:
    """The mean of two, another peer each time (NoLoCo): anchors differ then, and are averaged too."""

    interval: int

    def weigh(self, progress: SampleProgress | None, wire: Wire) -> Weight:
        return Weight(1.0)

    async def meet(self, part: Due, state: LocalState, wire: Wire) -> Tensor:
        moved = part.now - part.anchor
        schedule = Schedule("dissemination", wire.world_size, seed=0)
        peers = schedule.peers(wire.rank, part.step // self.interval)
        ours = torch.cat([moved, part.anchor])
        theirs = ours.clone()  # alone, nobody overwrites it
        await wire.exchange(send=ours, to=peers.to, recv=theirs, source=peers.source, tag=part.bucket)
        their_moved, their_anchor = theirs.chunk(2)
        moved.lerp_(their_moved, 0.5)
        part.anchor.lerp_(their_anchor, 0.5)  # not by the outer step, whose momentum would make it overshoot
        state.outer.step_(part.anchor, moved, part.velocity)
        return part.anchor


def _square(data: Tensor) -> float:
    return float(data.square().sum())
