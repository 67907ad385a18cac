"""How much to remove next: by whether the loss keeps falling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

FASTER, SLOWER = 1.25, 0.5
MOST, LEAST = 2.0, 1 / 16
"""Of the budget."""
SURE = 2.0
"""A rise or a fall counts if it is so many standard errors large."""

Decision = Literal["remove", "undo", "wait"]


@dataclass(slots=True)
class RemovalPace:
    """What one training has learnt about how much it can lose."""

    adaptive: bool
    strength: float = 1.0
    """How much of the budget the next event may use."""
    _losses: list[float | Tensor] = field(default_factory=list)
    """Since the last event."""
    _before: tuple[float, float] | None = None
    """Mean loss, and its squared standard error, before the last event."""
    _resting: bool = False

    def observe(self, loss: float | Tensor) -> None:
        if self.adaptive:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    def sums(self) -> list[float]:
        """Count, sum and sum of squares of the later half of this worker's losses: the first steps after an
        event are those of its recovery."""
        recent = [float(loss) for loss in self._losses[len(self._losses) // 2 :]]
        self._losses.clear()
        return [float(len(recent)), sum(recent), sum(loss * loss for loss in recent)]

    def decide(self, sums: list[float]) -> Decision:
        """What to do now, from the losses of all workers."""
        if not self.adaptive:
            return "remove"
        count, total, squares = sums
        if count < 2:
            return "wait"  # nobody tells the loss; `Shrinking` has said so
        mean = total / count
        error = max(squares / count - mean * mean, 0.0) / (count - 1)
        before, self._before = self._before, (mean, error)
        if self._resting:
            self._resting = False
            return "remove"
        if before is None:
            return "remove"
        fall, sure = before[0] - mean, SURE * (error + before[1]) ** 0.5
        if fall < -sure:
            self.strength = max(self.strength * SLOWER, LEAST)
            self._resting = True
            self._before = before
            return "undo"
        if fall < sure:  # neither: what was removed stays, and the next event compares with the same loss
            self._before = before
            return "wait"
        self.strength = min(self.strength * FASTER, MOST)
        return "remove"

    def state_dict(self) -> dict[str, Any]:
        return {"strength": self.strength, "before": list(self._before or ()), "resting": self._resting}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.strength, self._resting = float(saved["strength"]), bool(saved["resting"])
        self._before = (float(saved["before"][0]), float(saved["before"][1])) if saved["before"] else None
