"""What a link has done so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a link has done so far on this worker."""

    steps: int
    """Optimizer steps."""
    rounds: int
    """Wire operations."""
    sent_bytes: int
    received_bytes: int
    messages: int
    """Messages sent."""
    exposed_s: float
    """Seconds the training thread waited for the wire with nothing else to do."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """What the strategy tells of itself, by name."""
