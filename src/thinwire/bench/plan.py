"""What is measured in which order, and how long it will take: arithmetic only; no torch, no clock.

One turn goes through all cells, and in each through all systems, one block after another, so that a busy
moment of the machine hits neighbours alike. Every turn begins with another system. After the first turn, a
cell that does not fit into the time any more is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.bench.config import BenchConfig
from thinwire.lab.nets import parse_net

START_S = 8.0
"""A lab with its workers."""
JOIN_S = 1.0
JOIN_S_PER_WORKER = 0.15
"""Joining, warming up and taking off again; processes share the cores."""
LONG_STEP_S = 3.0
"""A step that waits for the wire as long as this is the same every time."""
EXACT_SHARE = 0.5
"""Of the systems, about so many send as much as exact SGD does."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A place in the grid, where all systems are compared."""

    workers: int
    rate_bits_per_s: float | None
    """None over loopback."""
    net: str


@dataclass(frozen=True, slots=True)
class Block:
    """A few steps of one system."""

    cell: Cell
    system: str
    turn: int


def cells(config: BenchConfig, workers: int, *, shaped: bool) -> list[Cell]:
    """The cells of one set of processes; over loopback, where no rate applies, one for each net."""
    rates: Sequence[float | None] = config.rates_bits_per_s if shaped else [None]
    return [Cell(workers, rate, net) for net in config.nets for rate in rates]


def blocks_of(config: BenchConfig, cell: Cell, turn: int) -> list[Block]:
    """The blocks of one cell in one turn, in order."""
    first = turn % len(config.systems)
    order = config.systems[first:] + config.systems[:first]
    return [Block(cell, system, turn) for system in order]


def compute_s(cell: Cell) -> float:
    """Forward and backward of one step."""
    net = parse_net(cell.net)
    return net.forward_s + net.backward_s


def exact_step_s(cell: Cell) -> float:
    """A step that sends every gradient around a ring after computing.

    >>> round(exact_step_s(Cell(8, 200e6, "params=5e6,layers=16,forward=0.1,backward=0.2")), 3)
    1.7
    """
    if cell.rate_bits_per_s is None:
        return compute_s(cell)
    bits = 2 * (cell.workers - 1) / cell.workers * parse_net(cell.net).num_params * 32
    return compute_s(cell) + bits / cell.rate_bits_per_s


def block_s(cell: Cell, timed_s: float) -> float:
    """What one block takes, on average over systems: joining, one step to settle, the timed ones."""
    exact_s = exact_step_s(cell)
    dense_s = exact_s + max(timed_s, exact_s if exact_s > LONG_STEP_S else 2 * exact_s)
    thin_s = compute_s(cell) + timed_s
    own_s = JOIN_S + JOIN_S_PER_WORKER * cell.workers
    return own_s + EXACT_SHARE * dense_s + (1 - EXACT_SHARE) * thin_s


def turn_s(config: BenchConfig, workers: int, *, shaped: bool) -> float:
    """What one turn takes."""
    each = (block_s(cell, config.block_s) for cell in cells(config, workers, shaped=shaped))
    return len(config.systems) * sum(each)


def num_steps(*, timed_s: float, period: int, settle_s: float, compute_s: float) -> int:
    """How many steps to time: whole periods, about `timed_s` in all, at least two unless steps are long.

    `settle_s` is what one period took whose steps, but for the last, computed in no time.

    >>> num_steps(timed_s=2.0, period=1, settle_s=0.5, compute_s=0.3)
    4
    >>> num_steps(timed_s=2.0, period=1, settle_s=2.0, compute_s=0.3)
    2
    >>> num_steps(timed_s=2.0, period=8, settle_s=0.5, compute_s=0.3)
    8
    """
    whole_s = max(settle_s, compute_s, 1e-3) + (period - 1) * compute_s
    least = 1 if whole_s > LONG_STEP_S else 2
    return max(period * max(1, round(timed_s / whole_s)), least)


def fits(*, turn: int, elapsed_s: float, took_s: float, allowed_s: float) -> bool:
    """Whether there is time for a cell once more; the first turn is always completed."""
    return turn == 0 or elapsed_s + took_s <= allowed_s


@dataclass(slots=True)
class Outlook:
    """How long it will go on, corrected by how long it took so far."""

    config: BenchConfig
    shaped: bool
    studies_s: float
    """What the studies may take."""
    _spent: dict[int, float] = field(default_factory=dict)

    def allowed_s(self, workers: int) -> float:
        """Seconds for the turns of this number of workers: a share of what is left, by estimate."""
        left = [count for count in self.config.workers if count not in self._spent]
        seconds = {count: turn_s(self.config, count, shaped=self.shaped) for count in left}
        rest_s = 60 * self.config.minutes - sum(self._spent.values()) - START_S * len(left)
        return max(rest_s, 0.0) * seconds[workers] / sum(seconds.values())

    def spent(self, workers: int, seconds: float) -> None:
        """One set of processes has ended."""
        self._spent[workers] = seconds

    def left_s(self) -> float:
        """All that is still to come."""
        left = [count for count in self.config.workers if count not in self._spent]
        seconds = START_S * len(left) + self.studies_s
        for count in left:
            once_s = turn_s(self.config, count, shaped=self.shaped)
            seconds += max(once_s, min(self.config.turns * once_s, self.allowed_s(count)))
        return seconds
