"""Tables for people, as text; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.spread import Spread


def of_known(values: Sequence[float | None]) -> Spread | None:
    """Of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None


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
