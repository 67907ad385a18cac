"""Step times measured in turns: their spread, one timing per system and cell, cells in words; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.events import StepTimed
from thinwire.units import as_rate, as_seconds, count

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
        """Compute the spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

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
    ceilings: dict[GridCell, list[StepTimed]] = {}
    for block in sorted(blocks, key=lambda block: FAMILIES.index(block.family)):
        cell = GridCell(block.workers, block.rate_bits_per_s, block.net)
        groups.setdefault((cell, block.system), []).append(block)
        if block.family == "ceiling":
            ceilings.setdefault(cell, []).append(block)
    return [
        _timing(group, ceilings.get(cell, []), groups.get((cell, BASELINE), []))
        for (cell, _), group in groups.items()
    ]


def _timing(group: Sequence[StepTimed], ceiling: list[StepTimed], baseline: list[StepTimed]) -> Timing:
    first, done = group[0], [block for block in group if block.step_s]
    measured = ("step_s", "exposed_s", "processor_s", "sent_bytes", "metered_bytes", "messages")
    return Timing(
        workers=first.workers,
        rate_bits_per_s=first.rate_bits_per_s,
        net=first.net,
        system=first.system,
        family=first.family,
        turns=len(done),
        efficiency=speed_ratio(ceiling, done),
        speed_up=speed_ratio(baseline, done),
        compute_s=statistics.median(block.compute_s for block in group),
        emulated=any(block.emulated for block in group),
        # A single busy turn may have been something else that ran on this machine.
        processor_full=2 * sum(block.processor_full for block in done) > len(done),
        unavailable=None if done else first.unavailable or "no time taken",
        **{name: _of_known([getattr(block, name) for block in done]) for name in measured},
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


def median_or_dash(spread: Spread | None, show: Callable[[float], str]) -> str:
    """Format the median; `-` if there is none."""
    return "-" if spread is None else show(spread.median)


def ran(found: Iterable[Timing], cell: GridCell | None = None) -> list[Timing]:
    """The timings of systems that ran, in one cell or in all."""
    return [t for t in found if t.step_s is not None and cell in (None, t.cell)]


def cells(found: Iterable[Timing]) -> list[GridCell]:
    """All cells: by net as first met, then by rate (none first), then by workers."""
    known = list(dict.fromkeys(timing.cell for timing in found))
    nets = [cell.net for cell in known]
    return sorted(known, key=lambda cell: (nets.index(cell.net), cell.rate_bits_per_s or 0.0, cell.workers))


def headline(found: Sequence[Timing]) -> GridCell | None:
    """The cell of the headline: the first net at its middle rate, where most systems ran; of equal ones the
    one with the most workers that the machine's processors could carry."""
    known = cells(ran(found))
    if not known:
        return None
    of_net = [cell for cell in known if cell.net == known[0].net]
    rates = list(dict.fromkeys(cell.rate_bits_per_s for cell in of_net))
    at_rate = [cell for cell in of_net if cell.rate_bits_per_s == rates[len(rates) // 2]]
    full = {timing.cell for timing in found if timing.processor_full}
    carried = [cell for cell in at_rate if cell not in full] or at_rate
    return max(carried, key=lambda cell: (len(ran(found, cell)), cell.workers))


def best_of_ours(found: Sequence[Timing]) -> str | None:
    """The system of ours with the shortest steps over all cells, each cell counting the same."""
    ratios: dict[str, list[float]] = {}
    for cell in cells(found):
        here = ran(found, cell)
        fastest = min((timing.median_s for timing in here), default=0.0)
        for timing in here:
            if timing.family == "ours":
                ratios.setdefault(timing.system, []).append(timing.median_s / max(fastest, 1e-12))
    return min(ratios, key=lambda system: statistics.fmean(ratios[system]), default=None)


def speedups(found: Sequence[Timing], system: str, over: str) -> dict[GridCell, float]:
    """The speed of `system` as a multiple of `over`'s, by cell where both ran."""
    ours = {t.cell: t.median_s for t in ran(found) if t.system == system}
    theirs = {t.cell: t.median_s for t in ran(found) if t.system == over}
    return {cell: theirs[cell] / ours[cell] for cell in ours if cell in theirs}


def place(cell: GridCell, *, workers: bool = True) -> str:
    """A cell in words.

    >>> place(GridCell(8, 200e6, "resnet50"))
    'resnet50, 200 Mbit/s, 8 workers'
    """
    rate = [] if cell.rate_bits_per_s is None else [as_rate(cell.rate_bits_per_s)]
    return ", ".join([net_words(cell.net), *rate, *([count(cell.workers, "worker")] if workers else [])])


def net_words(net: str) -> str:
    """A net by its name, or, where it has none, by its size and speed.

    >>> net_words("params=5e6,layers=16,forward=0.1,backward=0.2")
    '5M parameters + 300 ms compute'
    """
    try:
        values = {key: float(value) for key, _, value in (pair.partition("=") for pair in net.split(","))}
        compute = as_seconds(values["forward"] + values["backward"])
        return f"{values['params'] / 1e6:.4g}M parameters + {compute} compute"
    except (ValueError, KeyError):
        return net
