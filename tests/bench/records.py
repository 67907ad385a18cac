"""Measurements as a bench would make them, for the tests of tables."""

from __future__ import annotations

from typing import Any

from thinwire.events import StepTimed

NET = "params=5e6,layers=16,forward=0.1,backward=0.2"


def timed(system: str, turn: int = 0, step_s: float | None = 1.0, **changes: Any) -> StepTimed:
    """One block of a cell with 8 workers at 200mbit."""
    usual: dict[str, Any] = {
        "family": "ceiling" if system == "silent" else "ours",
        "workers": 8,
        "rate_bits_per_s": 200e6,
        "net": NET,
        "compute_s": 0.3,
        "exposed_s": None,
        "processor_s": 0.05,
        "sent_bytes": 35e6,
        "messages": None,
        "emulated": True,
        "unavailable": None,
    }
    return StepTimed(system=system, turn=turn, step_s=step_s, **{**usual, **changes})
