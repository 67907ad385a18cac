"""Timings by cell: the order of cells, the one of the headline, the best of ours; cells and nets in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from thinwire.timings import GridCell, Timing
from thinwire.units import as_rate, as_seconds, count


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
