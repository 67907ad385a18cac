"""Step times measured in turns: their spread, and one timing per system and cell; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.events import StepTimed

Family = Literal["ceiling", "ours", "rival"]
FAMILIES: tuple[Family, ...] = ("ceiling", "ours", "rival")
CEILING = "silent"
"""Sends nothing; the speed of every other system is compared with its speed."""
BASELINE = "ddp"
"""The best-known rival, and the first comparison."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of repeated measurements, and the quartiles around it."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute the spread of at least one value.

        >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
        Spread(median=3.0, low=2.0, high=4.0, count=5)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def show(self, digits: int) -> str:
        """Format the median.

        >>> Spread.of([0.1, 0.2, 0.4]).show(1)
        '0.2'
        """
        return f"{self.median:.{digits}f}"

    def show_quartiles(self, digits: int) -> str:
        """Format the quartiles; `-` for a single value.

        >>> Spread.of([0.1, 0.2, 0.4]).show_quartiles(2), Spread.of([0.1]).show_quartiles(2)
        ('0.15-0.30', '-')
        """
        return "-" if self.count == 1 else f"{self.low:.{digits}f}-{self.high:.{digits}f}"


@dataclass(frozen=True, slots=True)
class GridCell:
    """A number of workers, a rate and a net: where all systems are compared."""

    workers: int
    rate_bits_per_s: float | None
    """None over loopback."""
    net: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One system in one cell, over all turns; numbers are per step and worker."""

    workers: int
    rate_bits_per_s: float | None
    net: str
    system: str
    family: Family
    turns: int
    step_s: Spread | None
    """None for a system that could not run."""
    efficiency: Spread | None
    """The ceiling's step time over this one's, within a turn."""
    speed_up: Spread | None
    """The baseline's step time over this one's, within a turn."""
    compute_s: float
    exposed_s: Spread | None
    processor_s: Spread | None
    sent_bytes: Spread | None
    metered_bytes: Spread | None
    messages: Spread | None
    emulated: bool
    processor_full: bool
    unavailable: str | None

    @property
    def cell(self) -> GridCell:
        return GridCell(self.workers, self.rate_bits_per_s, self.net)

    @property
    def median_s(self) -> float:
        """Median step time; only for a system that ran."""
        assert self.step_s is not None
        return self.step_s.median


def timings(blocks: Iterable[StepTimed]) -> list[Timing]:
    """One timing for every system in every cell: the ceiling, then ours, then rivals, each as first met."""
    groups: dict[tuple[GridCell, str], list[StepTimed]] = {}
    for block in sorted(blocks, key=lambda block: FAMILIES.index(block.family)):
        cell = GridCell(block.workers, block.rate_bits_per_s, block.net)
        groups.setdefault((cell, block.system), []).append(block)
    ceilings: dict[GridCell, list[StepTimed]] = {}
    for (cell, _), group in groups.items():
        ceilings.setdefault(cell, []).extend(group if group[0].family == "ceiling" else [])
    return [
        _timing(group, ceilings[cell], groups.get((cell, BASELINE), []))
        for (cell, _), group in groups.items()
    ]


def _timing(group: Sequence[StepTimed], ceiling: list[StepTimed], baseline: list[StepTimed]) -> Timing:
    first, done = group[0], [block for block in group if block.step_s]

    def over_turns(field: str) -> Spread | None:
        return _of_known([getattr(block, field) for block in done])

    return Timing(
        workers=first.workers,
        rate_bits_per_s=first.rate_bits_per_s,
        net=first.net,
        system=first.system,
        family=first.family,
        turns=len(done),
        step_s=over_turns("step_s"),
        efficiency=speed_ratio(ceiling, done),
        speed_up=speed_ratio(baseline, done),
        compute_s=statistics.median(block.compute_s for block in group),
        exposed_s=over_turns("exposed_s"),
        processor_s=over_turns("processor_s"),
        sent_bytes=over_turns("sent_bytes"),
        metered_bytes=over_turns("metered_bytes"),
        messages=over_turns("messages"),
        emulated=any(block.emulated for block in group),
        # A single busy turn may have been something else that ran on this machine.
        processor_full=2 * sum(block.processor_full for block in done) > len(done),
        unavailable=None if done else first.unavailable or "no time taken",
    )


def speed_ratio(other: Iterable[StepTimed], own: Iterable[StepTimed]) -> Spread | None:
    """The other system's step time over this one's, taken within each turn that has both."""
    others: dict[int, list[float]] = {}
    for block in other:
        others.setdefault(block.turn, []).extend([block.step_s] if block.step_s else [])
    pairs = [(others.get(block.turn), block.step_s) for block in own]
    return _of_known([statistics.median(theirs) / ours for theirs, ours in pairs if theirs and ours])


def _of_known(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread.of(known) if known else None
