"""Silent: nothing goes over the wire. The ceiling every other strategy is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinwire.strategies.base import Bucket, Strategy
from thinwire.wire.wire import Wire


@dataclass(frozen=True, kw_only=True, slots=True)
class Silent(Strategy):
    """Train every worker alone: the same hooks and buckets as any strategy, and no traffic.

    Its speed is what is left for communication to lose; its model is worth nothing.
    """

    async def reduce(self, bucket: Bucket, state: Any, wire: Wire) -> None:
        """Leave the gradients as they are; being here makes the engine walk its hooks and buckets."""
