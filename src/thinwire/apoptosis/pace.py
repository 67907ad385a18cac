"""When to remove, and how much: by whether the loss keeps falling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

FASTER, SLOWER = 1.5, 0.5
MOST, LEAST = 2.25, 1 / 16
"""Limits of `strength`, as parts of the budget."""
GROWTH = 2
"""Factor from each interval between removals to the next: what goes early is saved for longer, and
what an event costs does not depend on when it is."""
SURE = 2.0
"""Standard errors from which a rise or a fall counts."""

LITTLE = 0.02
"""Part of a layer; a layer that gave less is left out of the next events."""

Decision = Literal["remove", "undo", "wait"]


@dataclass(slots=True)
class RemovalPace:
    """The pace of one training, learnt from what it could lose. It is asked at regular checks; removals are
    due at the first, and after 2, 4, 8 ... times as many steps."""

    adaptive: bool
    first: int = 1
    """Intervals between checks that have gone by at the first one."""
    strength: float = 1.0
    """How much of the budget the next event may use."""
    _losses: list[float | Tensor] = field(default_factory=list)
    """Losses since the last check."""
    _before: tuple[float, float] | None = None
    """Mean loss, and its squared standard error, before the last removal."""
    _resting: bool = False
    """The last removal was undone: the next one asks for no fall of the loss."""
    _checks: int = 0
    _due: int = 1
    """The check at which the next removal is due."""
    _fresh: bool = False
    """Nothing has been checked since the last removal: it can be undone."""

    def observe(self, loss: float | Tensor) -> None:
        if self.adaptive:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    @property
    def removal_is_next(self) -> bool:
        """Whether the next check may remove neurons."""
        return self._checks + 1 >= self._due

    def skip(self) -> bool:
        """Pass over the next check if nothing can be decided there."""
        idle = not (self.removal_is_next or self._fresh)
        if idle:
            self._checks += 1
            self._losses.clear()
        return idle

    def sums(self) -> list[float]:
        """Count, sum and sum of squares of the later half of this worker's losses: the first steps after an
        event are those of its recovery."""
        skipped = len(self._losses) // 2 if len(self._losses) > 3 else 0
        recent = _numbers(self._losses[skipped:])
        self._losses.clear()
        return [float(len(recent)), sum(recent), sum(loss * loss for loss in recent)]

    def decide(self, sums: list[float]) -> Decision:
        """The decision at this check, from the losses of all workers."""
        self._checks += 1
        decision: Decision = "remove" if self._checks >= self._due else "wait"
        if self.adaptive:
            decision = self._weigh(decision, *sums)
        if decision == "remove":
            early = self.first - 1
            self._due = GROWTH * (early + self._checks) - early
        return decision

    def _weigh(self, planned: Decision, count: float, total: float, squares: float) -> Decision:
        if count < 2:
            return "wait"  # nobody tells the loss; `Shrinking` has said so
        mean = total / count
        error = max(squares / count - mean * mean, 0.0) / (count - 1)
        before, fresh, self._fresh = self._before, self._fresh, False
        fall, sure = 0.0, 0.0
        if before is not None:
            fall, sure = before[0] - mean, SURE * (error + before[1]) ** 0.5
        if fresh and fall < -sure:
            self.strength = max(self.strength * SLOWER, LEAST)
            self._resting = True
            return "undo"
        if planned == "wait" or (before is not None and fall < sure and not self._resting):
            return "wait"  # until a removal is due and the loss has fallen since the last one
        if before is not None and not self._resting:
            self.strength = min(self.strength * FASTER, MOST)
        self._before, self._resting, self._fresh = (mean, error), False, True
        return "remove"

    def state_dict(self) -> dict[str, Any]:
        return {
            "strength": self.strength,
            "before": list(self._before or ()),
            "resting": self._resting,
            "checks": self._checks,
            "due": self._due,
            "fresh": self._fresh,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.strength, self._resting = float(saved["strength"]), bool(saved["resting"])
        self._before = (float(saved["before"][0]), float(saved["before"][1])) if saved["before"] else None
        self._checks, self._due = int(saved["checks"]), int(saved["due"])
        self._fresh = bool(saved["fresh"])


def _numbers(losses: list[float | Tensor]) -> list[float]:
    """The losses as Python's numbers; those of a GPU at once, since each one alone would wait for it."""
    on_gpu = [loss.reshape(()) for loss in losses if isinstance(loss, Tensor) and loss.is_cuda]
    if len(on_gpu) < len(losses) or len({loss.device for loss in on_gpu}) != 1:
        return [float(loss) for loss in losses]
    numbers: list[float] = torch.stack(on_gpu).tolist()
    return numbers


@dataclass(slots=True)
class Rests:
    """Layers that had little to give are left out of the next event, then of the next two, four ..., until
    they give more: weighing them costs the same, whatever comes of it."""

    _left: dict[int, int] = field(default_factory=dict)
    """Events that each layer is still left out of."""
    _length: dict[int, int] = field(default_factory=dict)

    def awake(self, count: int) -> list[int]:
        """Those of `count` layers that are weighed at this event."""
        found = [number for number in range(count) if not self._left.get(number)]
        self._left = {number: left - 1 for number, left in self._left.items() if left > 0}
        return found

    def weighed(self, number: int, share: float) -> None:
        """Take note of the share of a layer that has gone."""
        self._length[number] = 0 if share >= LITTLE else max(1, 2 * self._length.get(number, 0))
        self._left[number] = self._length[number]

    def state_dict(self) -> dict[str, Any]:
        return {
            "left": list(self._left.items()),
            "length": list(self._length.items()),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._left = {int(number): int(left) for number, left in saved["left"]}
        self._length = {int(number): int(length) for number, length in saved["length"]}
