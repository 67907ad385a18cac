"""The state of a top-k strategy: residuals, and where large numbers were found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.compress.threshold import Threshold
from thinwire.strategies.base import SAME, Bucket
from thinwire.strategies.parts import LocalClip, MomentumCorrection
from thinwire.strategies.sparse.cost_probe import CostProbe
from thinwire.strategies.sparse.plan import MessageFormat, MessagePlan
from thinwire.strategies.sparse.reduction import Message


@dataclass(slots=True)
class SparseRuntime:
    """What is made anew at every start, and not saved."""

    buckets: Sequence[Bucket]
    plan: MessagePlan
    probe: CostProbe
    clip: LocalClip | None = None
    momentum: MomentumCorrection | None = None
    formats: list[MessageFormat | None] = field(default_factory=list)
    """Formats of this step's messages; None: that bucket goes dense."""
    kept: list[Tensor] = field(default_factory=list)
    """By bucket, the indices that were applied in the step before."""
    sent: int = 0
    """Numbers of this step in messages of this worker."""
    passed: int = 0
    """Numbers of this step above its threshold."""


@dataclass(slots=True)
class SparseState:
    """One worker's state. Lists are in the order of buckets."""

    residuals: list[Tensor]
    """Gradients not sent yet, not divided by the number of workers; without the part that goes exact."""
    threshold: Threshold = field(metadata=SAME)
    weights: list[float] = field(metadata=SAME)
    """How capacity is divided: how many numbers passed the threshold when this bucket was last selected from,
    over all workers, plus 1; the same on all of them."""
    regions: list[list[int]]
    """With owners: where the region of each of them begins; the same on all workers."""
    rates: list[float] = field(metadata=SAME)
    """With `keep_rate`: the learning rate that each bucket's residual is scaled for."""
    kept: Tensor = field(metadata=SAME)
    """Indices applied in the last step, each bucket padded to its capacity; empty where nobody asks."""
    kept_capacities: list[int] = field(metadata=SAME)
    kept_counts: list[int] = field(metadata=SAME)
    runtime: SparseRuntime = field(init=False, repr=False)

    def scale_for_rate_(self, bucket: int) -> None:
        """Scale a residual so that it is applied with the learning rate of its step."""
        before, now = self.rates[bucket], self.runtime.buckets[bucket].rate
        if now:
            if before not in (0, now):
                self.residuals[bucket].mul_(before / now)
            self.rates[bucket] = now

    def remember_(self, bucket: int, result: Message) -> None:
        """Keep the indices that were applied."""
        if capacity := self.kept_capacities[bucket]:
            begin = sum(self.kept_capacities[:bucket])
            index = result.entries().index
            assert index.numel() <= capacity, "as many as the message can hold"
            self.kept[begin : begin + index.numel()] = index
            self.kept_counts[bucket] = index.numel()

    def last_kept(self) -> list[Tensor]:
        """The kept indices by bucket, as a copy: the next step overwrites them one by one."""
        parts = self.kept[: sum(self.kept_capacities)].clone().split(self.kept_capacities)
        return [part[:count] for part, count in zip(parts, self.kept_counts, strict=True)]
