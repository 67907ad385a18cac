"""A number that was measured several times, and tables for people; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, and the quartiles around it."""

    median: float
    low: float
    high: float
    count: int

    def show(self, digits: int) -> str:
        """
        >>> spread([0.1, 0.2, 0.4]).show(1)
        '0.2'
        """
        return f"{self.median:.{digits}f}"

    def show_quartiles(self, digits: int) -> str:
        """
        >>> spread([0.1, 0.2, 0.4]).show_quartiles(2), spread([0.1]).show_quartiles(2)
        ('0.15-0.30', '-')
        """
        return "-" if self.count == 1 else f"{self.low:.{digits}f}-{self.high:.{digits}f}"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def of_known(values: Sequence[float | None]) -> Spread | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return spread(known) if known else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A table as text; the first column is words, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """As Markdown, under a heading."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"{note}\n" for note in self.notes)])


def as_megabytes(count: float) -> str:
    """
    >>> as_megabytes(7_548_206), as_megabytes(81_673), as_megabytes(527)
    ('7.55', '0.0817', '0')
    """
    return f"{count / 1e6:.3g}" if count >= 1e3 else "0"


def short(reason: str) -> str:
    """A reason in a cell; the rest of it is in the notes.

    >>> short("not installed: pip install x")
    'not installed'
    """
    return reason.partition(":")[0]
