"""Momentum correction: each worker applies momentum before it selects (Deep Gradient Compression, 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.errors import SettingError
from thinwire.strategies.base import Bucket


@dataclass(frozen=True, slots=True)
class MomentumCorrection:
    """Velocities of one worker's gradients; their sum over workers is kept when the number of workers
    changes."""

    momentum: float
    velocities: list[Tensor]

    @classmethod
    def of(cls, momentum: float, buckets: Sequence[Bucket], owner: str) -> MomentumCorrection:
        if any(bucket.optimizer_state for bucket in buckets):
            raise SettingError(
                f"{owner}.momentum must be 0 with an optimizer that has momentum itself, got {momentum}",
                hint="take it off the optimizer (SGD without momentum), or leave it to the optimizer alone",
            )
        return cls(momentum, [bucket.zeros("velocity", on_resize="sum") for bucket in buckets])

    def accelerate_(self, bucket: int, gradients: Tensor) -> None:
        """Overwrite gradients with their velocity."""
        velocity = self.velocities[bucket]
        velocity.mul_(self.momentum).add_(gradients[: velocity.numel()])
        gradients[: velocity.numel()] = velocity

    def mask_(self, bucket: int, applied: Tensor | slice) -> None:
        """Zero the velocity at applied indices (factor masking)."""
        velocity = self.velocities[bucket]
        velocity[applied if isinstance(applied, slice) else applied.to(velocity.device)] = 0
