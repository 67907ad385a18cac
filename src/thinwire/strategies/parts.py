"""Parts that strategies are composed of: local clipping, momentum correction, density, finite numbers.

All messages of a step together always have the same capacity, so traffic is known beforehand. How the
capacity is divided among buckets follows where large numbers were found, so the density is that of the whole
model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.errors import NumericError, SettingError, check
from thinwire.strategies.base import Bucket, local_norm
from thinwire.wire.work import Work

FIRST_DENSITY = 0.25
FALL = 4
"""Stages of the warm-up begin at FIRST_DENSITY, each a FALL-th of the one before (as in DGC)."""


@dataclass(slots=True)
class LocalClip:
    """Clips the gradients of all buckets together, so nothing is sent before the last one is there."""

    max_norm: float
    """Largest norm of the mean over workers; a worker's own gradient may be sqrt(P) times as large."""
    num_buckets: int
    _norm_known: Work = field(default_factory=Work)
    _squares: float = 0.0
    _seen: int = 0
    _scale: float = 1.0

    async def clip_(self, gradients: Tensor, world_size: int) -> None:
        """Scale one bucket's gradients, once those of all buckets have been seen."""
        self._squares += 0.0 if gradients.is_meta else float(gradients.norm()) ** 2
        self._seen += 1
        known = self._norm_known
        if self._seen == self.num_buckets:
            scale = local_norm(self.max_norm, world_size) / math.sqrt(self._squares) if self._squares else 1.0
            self._scale = min(1.0, scale)
            self._norm_known, self._squares, self._seen = Work(), 0.0, 0
            known.finish()
        await known
        if self._scale < 1:
            gradients.mul_(self._scale)


@dataclass(frozen=True, slots=True)
class MomentumCorrection:
    """Velocities of one worker's gradients; another number of workers keeps their sum."""

    momentum: float
    velocities: list[Tensor]

    @classmethod
    def of(cls, momentum: float, buckets: Sequence[Bucket], owner: str) -> MomentumCorrection:
        alone = not any(bucket.optimizer_state for bucket in buckets)
        hint = "take it off the optimizer (SGD without momentum), or leave it to the optimizer alone"
        rule = "0 with an optimizer that has momentum itself"
        check(alone, f"{owner}.momentum", rule, momentum, hint=hint)
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


def density_at(step: int, density: float, warmup_steps: int) -> float:
    """The density of a step, counted from 0: in stages of equal length down to `density`.

    >>> [density_at(step, 0.001, 8) for step in (0, 2, 4, 6, 8)]
    [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    """
    if step >= warmup_steps:
        return density
    stages = [FIRST_DENSITY]
    while stages[-1] / FALL > density:
        stages.append(stages[-1] / FALL)
    return max(density, stages[step * len(stages) // warmup_steps])


def total_capacity(numels: Sequence[int], density: float, quantum: int) -> int:
    """Entries that all messages of a step together can hold."""
    return sum(-(-max(1, round(density * numel)) // quantum) * quantum for numel in numels if numel)


def divide_capacity(
    numels: Sequence[int], weights: Sequence[float], capacity: int, quantum: int
) -> list[int]:
    """Give each bucket its part of the capacity by weight: in multiples of `quantum`, at least one, and no
    more than hold all its numbers; none to an empty bucket.

    >>> divide_capacity([1000, 1000, 0], [3.0, 1.0, 1.0], capacity=40, quantum=4)
    [28, 12, 0]
    """
    most = [-(-numel // quantum) for numel in numels]
    units = [min(1, limit) for limit in most]
    left = capacity // quantum - sum(units)
    while left > 0:
        growing = [b for b, limit in enumerate(most) if units[b] < limit]
        if not growing:
            break
        total = sum(weights[b] for b in growing)
        shares = {b: left * weights[b] / total for b in growing}
        given = {b: min(int(shares[b]), most[b] - units[b]) for b in growing}
        if not any(given.values()):  # less than one unit each: to those that come nearest to one
            nearest = sorted(growing, key=lambda b: (-shares[b], b))[:left]
            given = dict.fromkeys(nearest, 1)
        for bucket, more in given.items():
            units[bucket] += more
        left -= sum(given.values())
    return [unit * quantum for unit in units]


def check_finite(data: Tensor, bucket: Bucket) -> Tensor:
    """Gives `data`, a bucket's parameters, or raises what names the first that is not finite.

    One worker's NaN would be everybody's after log2(P) rounds.
    """
    if data.is_meta or math.isfinite(data.sum()):
        return data
    wrong = data.isfinite().logical_not_().nonzero()
    if wrong.numel():  # and not just a sum that is too large
        raise NumericError(
            f"{bucket.name_at(int(wrong[0]))} is not finite, and is not sent",
            hint="look at this worker's data, lower the learning rate or clip gradients",
        )
    return data


def check_real(buckets: Sequence[Bucket], owner: str) -> None:
    """Raise SettingError if parameters are complex, for a strategy that compares or rounds numbers."""
    for bucket in buckets:
        if bucket.gradient.is_complex():
            raise SettingError(
                f"parameter {bucket.name_at(0)} is {bucket.gradient.dtype}; {owner} sends real numbers only",
                hint="use AllReduce(), or view a real parameter by torch.view_as_complex in forward",
            )
