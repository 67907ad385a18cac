"""Which part of the model is synchronized after which step: fragments of equal size, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from thinwire.errors import check

Pattern = Literal["sequential", "strided"]
Span = tuple[int, int]
"""From, and up to but without, within a bucket."""
STRIDES = 4
"""Pieces of a strided fragment."""


@dataclass(frozen=True, slots=True)
class Fragments:
    """The model cut into `count` fragments of equal size.

    >>> thirds = Fragments([6, 6], count=3)
    >>> thirds.due(bucket=0, step=1, interval=3), thirds.due(bucket=1, step=1, interval=3)
    ([(4, 6)], [(0, 2)])
    """

    numels: Sequence[int]
    """Numbers in every bucket."""
    count: int = 1
    pattern: Pattern = "sequential"
    """A fragment is one piece of the model, or pieces from all over it."""

    def turns(self, interval: int) -> list[int]:
        """By fragment: the step of an interval after which it is due."""
        return [fragment * interval // self.count for fragment in range(self.count)]

    def due(self, bucket: int, step: int, interval: int) -> list[Span]:
        """The parts of a bucket to synchronize after a step, where each is due every `interval` steps, evenly
        spread in time."""
        turns = self.turns(interval)
        if step % interval not in turns:
            return []
        before = [0, *accumulate(self.numels)]
        pieces = self.count * (STRIDES if self.pattern == "strided" else 1)
        found: list[Span] = []
        for piece in range(pieces):
            if turns[piece % self.count] != step % interval:
                continue
            bounds = (before[-1] * piece // pieces, before[-1] * (piece + 1) // pieces)
            start, stop = (min(max(at - before[bucket], 0), self.numels[bucket]) for at in bounds)
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            elif start < stop:
                found.append((start, stop))
        return found


def check_fragments(owner: str, interval: int, fragments: int, delay: int) -> None:
    """Raise SettingError for numbers that do not go together."""
    check(interval >= 1, f"{owner}.interval", "1 or more steps", interval)
    check(1 <= fragments <= interval, f"{owner}.fragments", f"1 to interval ({interval})", fragments)
    check(0 <= delay <= interval, f"{owner}.delay", f"0 to interval ({interval}) steps", delay)
