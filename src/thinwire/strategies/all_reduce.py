"""AllReduce: every gradient goes to everyone, summed on the way. Exact synchronous SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinwire.strategies.base import Bucket, Overlap, Strategy
from thinwire.wire.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce(Strategy):
    """Average gradients over all workers before every step.

    The result is that of one worker with the whole batch, whatever the number of workers.

    Reference: Das et al., Distributed Deep Learning Using Synchronous SGD, 2016, arXiv:1602.06709.
    """

    overlap: Overlap = "backward"
    """What sending hides behind: "backward"; "forward" too (a layer is updated when the next forward
    reaches it); or "none"."""

    @property
    def replicas_agree(self) -> bool:
        return True

    @property
    def num_buckets(self) -> int:
        # Every message costs the processor about a millisecond; half as many pieces again are cut finer.
        return 16 if self.overlap == "forward" else 24

    async def reduce(self, bucket: Bucket, state: Any, wire: Wire) -> None:
        await wire.all_reduce_(bucket.gradient)
        if wire.world_size > 1:
            bucket.gradient.div_(wire.world_size)
