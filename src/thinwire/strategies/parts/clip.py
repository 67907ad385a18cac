"""Local clipping: each worker clips its own gradient before anything is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.strategies.base import local_norm
from thinwire.wire.work import Work


@dataclass(slots=True)
class LocalClip:
    """Clips the gradients of all buckets together, so nothing is sent before the last one is there."""

    max_norm: float
    """Of the mean over workers; each worker's own gradient may be sqrt(P) times as large."""
    num_buckets: int
    _norm_known: Work = field(default_factory=Work)
    _squares: float = 0.0
    _seen: int = 0
    _scale: float = 1.0

    async def clip_(self, gradients: Tensor, world_size: int) -> None:
        """Scale one bucket's gradients, once those of all buckets have been seen."""
        self._squares += 0.0 if gradients.is_meta else float(gradients.norm()) ** 2
        self._seen += 1
        known = self._norm_known
        if self._seen == self.num_buckets:
            scale = local_norm(self.max_norm, world_size) / math.sqrt(self._squares) if self._squares else 1.0
            self._scale = min(1.0, scale)
            self._norm_known, self._squares, self._seen = Work(), 0.0, 0
            known.finish()
        await known
        if self._scale < 1:
            gradients.mul_(self._scale)
