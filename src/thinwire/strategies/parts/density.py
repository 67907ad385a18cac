"""Density: how many numbers of each bucket a step sends, and how that falls during a warm-up; from sizes
alone.

All messages of a step together always have the same capacity, so traffic is known beforehand. How the
capacity is divided among buckets follows where large numbers were found, so the density is that of the whole
model.
"""

from __future__ import annotations

from collections.abc import Sequence

FIRST_DENSITY = 0.25
FALL = 4
"""Stages of the warm-up begin at FIRST_DENSITY, each a FALL-th of the one before (as in DGC)."""


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
