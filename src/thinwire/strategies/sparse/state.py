"""What moves in a top-k strategy: what was not sent yet, and where large numbers were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinwire.strategies.base import Bucket
from thinwire.strategies.sparse.form import Form
from thinwire.strategies.sparse.gauge import Gauge
from thinwire.strategies.sparse.plan import Plan
from thinwire.wire.base import Work

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.compress.threshold import Threshold
    from thinwire.strategies.sparse.turn import Message


@dataclass(slots=True)
class Fixed:
    """What does not move, and is made anew at every start."""

    buckets: Sequence[Bucket]
    plan: Plan
    gauge: Gauge
    forms: list[Form | None] = field(default_factory=list)
    """Of this step's messages; None: that bucket goes dense."""
    kept: list[Tensor] = field(default_factory=list)
    """Of each bucket the indices that were applied in the step before."""
    norm: Work = field(default_factory=Work)
    """Ends when all gradients of a step have come; used to clip them."""
    squares: float = 0.0
    sent: int = 0
    """Numbers of this step in messages of this worker."""
    passed: int = 0
    """Numbers of this step above its threshold."""


@dataclass(slots=True)
class SparseState:
    """Of one worker. Lists are in the order of buckets."""

    residuals: list[Tensor]
    """What was not sent yet, not divided by the number of workers; without the part that goes exact."""
    velocities: list[Tensor]
    """With momentum correction: what momentum has made of this worker's gradients."""
    threshold: Threshold
    weights: list[float]
    """How the room in messages is divided: how many numbers passed the threshold when this bucket was last
    selected from, over all workers, plus 1; the same on all of them."""
    regions: list[list[int]]
    """With owners: where the region of each of them begins; the same on all workers."""
    rates: list[float]
    """If rates are kept: the learning rate that each bucket's residual is meant for."""
    kept: Tensor
    """The indices that were applied in the last step, bucket after bucket, each with its room; without any
    where they are not asked for."""
    rooms: list[int]
    """How much room each bucket has among them,"""
    counts: list[int]
    """and how many there are of it."""
    step: int = -1
    """Of the gradients under way."""
    fixed: Fixed = field(init=False, repr=False)

    def accelerate_(self, bucket: int, gradients: Tensor, momentum: float) -> None:
        """Overwrite gradients with what momentum makes of them; what was applied no longer pushes on."""
        self.stop_(bucket, self.fixed.kept[bucket].long())
        velocity = self.velocities[bucket]
        velocity.mul_(momentum).add_(gradients[: velocity.numel()])
        gradients[: velocity.numel()] = velocity

    def stop_(self, bucket: int, sent: Tensor | slice) -> None:
        """What is sent shall not push on (factor masking)."""
        velocity = self.velocities[bucket]
        velocity[sent if isinstance(sent, slice) else sent.to(velocity.device)] = 0

    def keep_rate_(self, bucket: int) -> None:
        """Make a residual so much larger as the learning rate has become smaller."""
        before, now = self.rates[bucket], self.fixed.buckets[bucket].rate
        if now:
            if before not in (0, now):
                self.residuals[bucket].mul_(before / now)
            self.rates[bucket] = now

    def keep_(self, bucket: int, result: Message) -> None:
        """Remember which indices were applied."""
        if room := self.rooms[bucket]:
            begin = sum(self.rooms[:bucket])
            index = result.entries().index
            assert index.numel() <= room, "as many as the message has room for"
            self.kept[begin : begin + index.numel()] = index
            self.counts[bucket] = index.numel()

    def last_kept(self) -> list[Tensor]:
        """Of each bucket, as a copy: the next step overwrites them one by one."""
        parts = self.kept[: sum(self.rooms)].clone().split(self.rooms)
        return [part[:count] for part, count in zip(parts, self.counts, strict=True)]
