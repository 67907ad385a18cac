"""The order and the expected duration of a benchmark: arithmetic only; no torch, no clock.

A turn goes through all cells, and in each cell through one block of every system, so that a busy moment of
the machine hits neighbours alike. After the first turn, a cell that no longer fits into the time is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from thinwire.bench.config import BenchConfig
from thinwire.lab.nets import parse_net
from thinwire.timings import GridCell

T = TypeVar("T")
START_S = 8.0
"""Starting a lab with its workers."""
JOIN_S = 1.0
JOIN_S_PER_WORKER = 0.15
"""Joining, warming up and taking off again; processes share the cores."""
LONG_STEP_S = 3.0
"""One step of this length is enough: waiting for the network dominates it, and hardly varies."""
EXACT_SHARE = 0.5
"""Share of the systems that send about as much as exact SGD."""


def cells(config: BenchConfig, workers: int, *, shaped: bool) -> list[GridCell]:
    """The cells of one number of workers; over loopback, where no rate applies, one for each net."""
    rates: Sequence[float | None] = config.rates_bits_per_s if shaped else [None]
    return [GridCell(workers, rate, net) for net in config.nets for rate in rates]


def rotated(systems: Sequence[T], turn: int) -> list[T]:
    """The order of one turn: every turn begins with another system, the same on all workers."""
    first = turn % len(systems)
    return [*systems[first:], *systems[:first]]


def compute_s(cell: GridCell) -> float:
    net = parse_net(cell.net)
    return net.forward_s + net.backward_s


def exact_step_s(cell: GridCell) -> float:
    """Seconds of a step that sends every gradient around a ring after computing.

    >>> round(exact_step_s(GridCell(8, 200e6, "params=5e6,layers=16,forward=0.1,backward=0.2")), 3)
    1.7
    """
    if cell.rate_bits_per_s is None:
        return compute_s(cell)
    bits = 2 * (cell.workers - 1) / cell.workers * parse_net(cell.net).num_params * 32
    return compute_s(cell) + bits / cell.rate_bits_per_s


def block_s(cell: GridCell, timed_s: float) -> float:
    """Expected seconds of one block, averaged over systems: joining, one step to settle, the timed steps."""
    exact_s = exact_step_s(cell)
    dense_s = exact_s + max(timed_s, exact_s if exact_s > LONG_STEP_S else 2 * exact_s)
    sparse_s = compute_s(cell) + timed_s
    join_s = JOIN_S + JOIN_S_PER_WORKER * cell.workers
    return join_s + EXACT_SHARE * dense_s + (1 - EXACT_SHARE) * sparse_s


def turn_s(config: BenchConfig, workers: int, *, shaped: bool) -> float:
    each = (block_s(cell, config.block_s) for cell in cells(config, workers, shaped=shaped))
    return len(config.systems) * sum(each)


def num_steps(*, timed_s: float, period: int, settle_s: float, compute_s: float) -> int:
    """The number of steps to time: whole periods, about `timed_s` in all, at least two unless steps are long.

    `settle_s` is the duration of one period in which only the last step computed.

    >>> num_steps(timed_s=2.0, period=8, settle_s=0.5, compute_s=0.3)
    8
    """
    period_s = max(settle_s, compute_s, 1e-3) + (period - 1) * compute_s
    least = 1 if period_s > LONG_STEP_S else 2
    return whole_periods(max(period * round(timed_s / period_s), least), period)


def whole_periods(steps: int, period: int) -> int:
    """`steps` rounded up to whole periods.

    >>> whole_periods(9, period=4), whole_periods(8, period=1)
    (12, 8)
    """
    return period * math.ceil(steps / period)


def fits(*, turn: int, elapsed_s: float, took_s: float, allowed_s: float) -> bool:
    """Whether there is time for another turn of a cell; the first turn is always completed."""
    return turn == 0 or elapsed_s + took_s <= allowed_s


@dataclass(slots=True)
class Outlook:
    """Estimates the time that is left, corrected by the time spent so far."""

    config: BenchConfig
    shaped: bool
    studies_s: float
    """Seconds allowed for the studies."""
    spent: dict[int, float] = field(default_factory=dict)
    """Seconds that a number of workers took."""

    def _left(self) -> dict[int, float]:
        """Seconds of one turn, by the numbers of workers that are still to come."""
        left = [workers for workers in self.config.workers if workers not in self.spent]
        return {workers: turn_s(self.config, workers, shaped=self.shaped) for workers in left}

    def allowed_s(self, workers: int) -> float:
        """Seconds for the turns of this number of workers: its estimated share of the time left."""
        left = self._left()
        rest_s = 60 * self.config.minutes - sum(self.spent.values()) - START_S * len(left)
        return max(rest_s, 0.0) * left[workers] / sum(left.values())

    def left_s(self) -> float:
        """Expected seconds until the end."""
        return self.studies_s + sum(
            START_S + max(once_s, min(self.config.turns * once_s, self.allowed_s(workers)))
            for workers, once_s in self._left().items()
        )
