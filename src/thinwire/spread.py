"""A number that was measured several times; no torch."""

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

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value.

        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
        Spread(median=3.0, low=2.0, high=4.0, count=5)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def show(self, digits: int) -> str:
        """
        >>> Spread.of([0.1, 0.2, 0.4]).show(1)
        '0.2'
        """
        return f"{self.median:.{digits}f}"

    def show_quartiles(self, digits: int) -> str:
        """
        >>> Spread.of([0.1, 0.2, 0.4]).show_quartiles(2), Spread.of([0.1]).show_quartiles(2)
        ('0.15-0.30', '-')
        """
        return "-" if self.count == 1 else f"{self.low:.{digits}f}-{self.high:.{digits}f}"
