"""Multiplies learning rates while optimizers step, and gives users back what they set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer


class RateScale:
    """Scales learning rates for the time of a step, those of each optimizer by a factor of its own.

    Every optimizer's step is proportional to its rate, so this scales the step; schedulers never see it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scale_of: Callable[[Optimizer], float]) -> None:
        self._optimizers, self._scale_of = optimizers, scale_of
        self._scaled: list[tuple[dict[str, Any], Any, Any, float]] = []
        """Groups with their rate before and after, and its factor."""

    def apply_(self) -> None:
        """A step begins; several optimizers make one together."""
        if self._scaled:
            return
        for optimizer in self._optimizers:
            scale = self._scale_of(optimizer)
            for group in optimizer.param_groups if scale != 1 else ():
                before = group["lr"]
                group["lr"] = before * scale
                self._scaled.append((group, before, group["lr"], scale))

    def restore_(self) -> None:
        """The step is over."""
        for group, before, after, scale in self._scaled:
            # a scheduler may have stepped between two optimizers
            group["lr"] = before if group["lr"] is after else group["lr"] / scale
        self._scaled.clear()
