"""Which part of the model travels in a round: the model in equal cells, and a window that goes round them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

CELLS = 256
"""About as many as a model is cut into: the least that a round can send."""

Span = tuple[int, int]
"""From, and up to but without, within a bucket."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of one bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(slots=True)
class Place:
    """Where the window stands; the same on all workers, as it only depends on the rounds so far."""

    cell: int = 0
    """The first one of the next round."""
    passes: int = 0
    """Times the window has gone round the model."""
    rounds: int = 0
    """In this pass."""

    def advance(self, count: int, num_cells: int) -> tuple[int, int]:
        """Move on by one round of `count` cells: its first cell, and its number in the schedule.

        The number is not just a count of rounds: the window goes round in a fixed number of them, as the
        schedule does, and a cell that always met the same hop of it would never get further. So each pass
        begins one hop on.
        """
        first, number = self.cell, self.passes + self.rounds
        self.cell += count
        self.rounds += 1
        if self.cell >= num_cells:
            self.cell -= num_cells
            self.passes += 1
            self.rounds = 0
        return first, number


@dataclass(frozen=True, slots=True)
class Window:
    """What one round sends."""

    number: int
    """Which round of the schedule it is."""
    cells: Sequence[int]
    spans: dict[int, list[Span]]
    """By bucket, those next to each other as one."""


class Cells:
    """A model's buckets cut into pieces of about equal size."""

    def __init__(self, numels: Sequence[int]) -> None:
        size = max(1, -(-sum(numels) // CELLS))
        self.cells = list(chain.from_iterable(_cut(b, numel, size) for b, numel in enumerate(numels)))

    def __len__(self) -> int:
        return len(self.cells)

    def count(self, share: float) -> int:
        """Cells of a share of the model, at least one."""
        return min(len(self), max(1, round(share * len(self))))

    def window(self, place: Place, count: int) -> Window:
        """The next `count` cells; `place` moves on."""
        first, number = place.advance(count, len(self))
        cells = sorted((first + i) % len(self) for i in range(count))
        spans: dict[int, list[Span]] = {}
        for each in (self.cells[i] for i in cells):
            own = spans.setdefault(each.bucket, [])
            if own and own[-1][1] == each.start:
                own[-1] = (own[-1][0], each.stop)
            else:
                own.append((each.start, each.stop))
        return Window(number, cells, spans)


def _cut(bucket: int, numel: int, size: int) -> list[Cell]:
    pieces = -(-numel // size)
    bounds = [numel * i // pieces for i in range(pieces + 1)]
    return [Cell(bucket, bounds[i], bounds[i + 1]) for i in range(pieces)]
