"""What a worker has done so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What one worker has done so far."""

    steps: int = 0
    """Optimizer steps."""
    rounds: int = 0
    """Wire operations."""
    traffic: Traffic = field(default_factory=Traffic)
    exposed_s: float = 0.0
    """Seconds training waited for the wire with nothing else to do."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """Numbers the strategy tells of itself, by name."""

    @property
    def sent_bytes(self) -> int:
        return self.traffic.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.traffic.received_bytes

    @property
    def messages(self) -> int:
        """Messages sent."""
        return self.traffic.messages
