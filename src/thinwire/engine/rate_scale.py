"""Multiplies learning rates while optimizers step, and gives users back what they set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer


class RateScale:
    """Scales the learning rates of all parameter groups by one factor, for the time of a step.

    Every optimizer's step is proportional to its rate, so this scales the step; schedulers never see it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scale: float) -> None:
        self._optimizers, self._scale = optimizers, scale
        self._scaled: list[tuple[dict[str, Any], Any, Any]] = []
        """Groups with their rate before and after."""

    def apply_(self) -> None:
        """A step begins; several optimizers make one together."""
        if self._scale == 1 or self._scaled:
            return
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group in groups:
            before = group["lr"]
            group["lr"] = before * self._scale
            self._scaled.append((group, before, group["lr"]))

    def restore_(self) -> None:
        """The step is over."""
        for group, before, after in self._scaled:
            # a scheduler may have stepped between two optimizers
            group["lr"] = before if group["lr"] is after else group["lr"] / self._scale
        self._scaled.clear()
