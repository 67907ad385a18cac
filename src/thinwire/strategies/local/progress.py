"""How much workers count: all the same, or by the samples that each has trained on since a part was due."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from thinwire.wire.wire import Wire
from thinwire.wire.work import Work

if TYPE_CHECKING:
    from thinwire.strategies.base import Bucket


class Weight(NamedTuple):
    """How much this worker counts in a step; and all of them together, once `work` has ended."""

    own: float
    total: Tensor | None = None
    """None: whoever adds changes up divides by all weights."""
    work: Work | None = None

    async def scale(self, world_size: int) -> float:
        """What this worker's changes are multiplied by, so that their mean over workers is a weighted one."""
        if self.total is None or self.work is None:
            return self.own
        await self.work
        total = float(self.total)
        return self.own * world_size / total if total > 0 else 1.0


@dataclass(slots=True)
class SampleProgress:
    """The samples of one worker."""

    merged: list[float]
    """By turn of the interval: the samples so far when its part was last due."""
    samples: float = 0.0
    """So far."""
    own: float = field(init=False, repr=False, default=0.0)
    """In the step under way: the samples since its turn was last due."""
    _step: int = field(init=False, repr=False, default=0)
    _agreed: Weight | None = field(init=False, repr=False, default=None)

    def count(self, bucket: Bucket, turn: int) -> None:
        """Called for every bucket in every step."""
        if self._step != bucket.step:
            self._step, self._agreed = bucket.step, None
            self.samples += bucket.samples
            self.own, self.merged[turn] = self.samples - self.merged[turn], self.samples

    def agree(self, wire: Wire) -> Weight:
        """Ask once in a step how much all count, in its first coroutine that has something due. As long as
        no coroutine has waited for anything, that is the same one on all workers."""
        if self._agreed is None:
            total = torch.tensor([self.own], dtype=torch.float64)
            self._agreed = Weight(self.own, total, wire.all_reduce_(total))
        return self._agreed
