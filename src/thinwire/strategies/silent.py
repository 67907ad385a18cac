"""Silent: nothing goes over the wire. The ceiling every other strategy is measured against."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.strategies.base import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Silent(Strategy):
    """Train every worker alone: the same hooks and buckets as any strategy, and no traffic.

    Its speed is what is left for communication to lose; its model is worth nothing.
    """
