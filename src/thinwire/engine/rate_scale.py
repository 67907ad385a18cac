"""Multiplies learning rates while optimizers step, and gives users back what they set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer


class RateScale:
    """Scales the learning rates of all parameter groups, each optimizer's by one factor, for the time of a
    step.

    Every optimizer's step is proportional to its rate, so this scales the step; schedulers never see it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scale_of: Callable[[Optimizer], float]) -> None:
        scales = [(optimizer, scale_of(optimizer)) for optimizer in optimizers]
        self._scales = [(optimizer, scale) for optimizer, scale in scales if scale != 1]
        self._scaled: list[tuple[dict[str, Any], Any, Any, float]] = []
        """Groups with their rate before and after, and its factor."""

    def apply_(self) -> None:
        """A step begins; several optimizers make one together."""
        if self._scaled:
            return
        for optimizer, scale in self._scales:
            for group in optimizer.param_groups:
                before = group["lr"]
                group["lr"] = before * scale
                self._scaled.append((group, before, group["lr"], scale))

    def restore_(self) -> None:
        """The step is over."""
        for group, before, after, scale in self._scaled:
            # a scheduler may have stepped between two optimizers
            group["lr"] = before if group["lr"] is after else group["lr"] / scale
        self._scaled.clear()
