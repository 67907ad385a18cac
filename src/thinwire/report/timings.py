"""Step times side by side: one value per system and cell, from benchmark blocks or from whole runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.events import StepTimed
from thinwire.spread import Spread

Family = Literal["ceiling", "ours", "rival"]
FAMILIES: tuple[Family, ...] = ("ceiling", "ours", "rival")
REFERENCE = "ddp"
"""The rival everybody knows; what ours are compared with first."""


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """Where a system was timed."""

    net: str
    rate_bits_per_s: float | None
    workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One system in one cell; seconds, bytes and messages are per step and worker."""

    system: str
    family: Family
    cell: Cell
    step_s: Spread | None = None
    """None for a system that could not run."""
    efficiency: Spread | None = None
    """The ceiling's step time over this one's, turn by turn; None without a ceiling."""
    compute_s: float = 0.0
    exposed_s: float | None = None
    processor_s: float | None = None
    sent_bytes: float | None = None
    messages: float | None = None
    emulated: bool = False
    processor_full: bool = False
    unavailable: str | None = None

    @property
    def median_s(self) -> float:
        """Of the step; only for a system that ran."""
        assert self.step_s is not None
        return self.step_s.median

    @property
    def other_s(self) -> float:
        """The part of a step that is neither compute nor known to be waiting for the wire."""
        return max(self.median_s - self.compute_s - (self.exposed_s or 0.0), 0.0)


def timings(blocks: Iterable[StepTimed]) -> list[Timing]:
    """Medians over the turns of each system in each cell: the ceiling, then ours, then rivals."""
    groups: dict[tuple[str, Cell], list[StepTimed]] = {}
    for block in sorted(blocks, key=lambda block: FAMILIES.index(block.family)):
        cell = Cell(block.net, block.rate_bits_per_s, block.workers)
        groups.setdefault((block.system, cell), []).append(block)
    ceilings = {
        (cell, block.turn): block.step_s
        for (_, cell), group in groups.items()
        for block in group
        if block.family == "ceiling" and block.step_s is not None
    }
    return [_timing(cell, group, ceilings) for (_, cell), group in groups.items()]


def _timing(cell: Cell, group: Sequence[StepTimed], ceilings: Mapping[tuple[Cell, int], float]) -> Timing:
    steps = [block.step_s for block in group if block.step_s is not None]
    ratios = [
        ceilings[cell, block.turn] / block.step_s
        for block in group
        if block.step_s and (cell, block.turn) in ceilings
    ]
    return Timing(
        system=group[0].system,
        family=group[0].family,
        cell=cell,
        step_s=Spread.of(steps) if steps else None,
        efficiency=Spread.of(ratios) if ratios else None,
        compute_s=statistics.median(block.compute_s for block in group),
        exposed_s=_median(group, lambda block: block.exposed_s),
        processor_s=_median(group, lambda block: block.processor_s),
        sent_bytes=_median(group, lambda block: block.sent_bytes),
        messages=_median(group, lambda block: block.messages),
        emulated=any(block.emulated for block in group),
        processor_full=any(block.processor_full for block in group),
        unavailable=None if steps else next((b.unavailable for b in group if b.unavailable), "no time taken"),
    )


def _median(group: Sequence[StepTimed], value: Callable[[StepTimed], float | None]) -> float | None:
    known = [found for block in group if (found := value(block)) is not None]
    return statistics.median(known) if known else None


def ran(found: Iterable[Timing], cell: Cell | None = None) -> list[Timing]:
    """Those with a time, of one cell or of all."""
    return [t for t in found if t.step_s is not None and cell in (None, t.cell)]


def cells(found: Iterable[Timing]) -> list[Cell]:
    """All cells: by net as first met, then by rate (none first), then by workers."""
    known = list(dict.fromkeys(timing.cell for timing in found))
    nets = list(dict.fromkeys(cell.net for cell in known))
    return sorted(known, key=lambda cell: (nets.index(cell.net), cell.rate_bits_per_s or 0.0, cell.workers))


def headline(found: Sequence[Timing]) -> Cell | None:
    """The cell a page speaks of first: the first net, its middle rate, and where most systems ran; of equal
    ones the most workers that the processors of this machine could carry."""
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


def speedups(found: Sequence[Timing], system: str, over: str) -> dict[Cell, float]:
    """How many times faster `system` is than `over`, in every cell where both ran."""
    ours = {t.cell: t.median_s for t in ran(found) if t.system == system}
    theirs = {t.cell: t.median_s for t in ran(found) if t.system == over}
    return {cell: theirs[cell] / ours[cell] for cell in ours if cell in theirs and ours[cell] > 0}
