"""Plots of step times: efficiency against workers, where a step goes, bytes per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.report.bars import THICK, at_end, bar_plot, whisker
from thinwire.report.drawing import Plot, end_labels, new_plot
from thinwire.report.looks import COMPUTE, INK, Look
from thinwire.report.timings import Cell, Timing, cells, headline, ran
from thinwire.report.words import net_words, place, slug
from thinwire.units import as_bytes, as_percent, as_rate, as_seconds

Looks = Mapping[str, Look]


def step_plots(found: Sequence[Timing], looks: Looks) -> list[Plot]:
    """Efficiency for every net and rate; step time and bytes for as many workers as the headline has."""
    measured = ran(found)
    plots = []
    for net, rate in dict.fromkeys((cell.net, cell.rate_bits_per_s) for cell in cells(measured)):
        here = [t for t in measured if (t.cell.net, t.cell.rate_bits_per_s) == (net, rate)]
        if any(t.efficiency is not None and t.family != "ceiling" for t in here):
            plots.append(efficiency(here, looks))
    steps, sizes = [], []
    for net in dict.fromkeys(timing.cell.net for timing in measured):
        of_net = [timing for timing in measured if timing.cell.net == net]
        at = headline(of_net)
        assert at is not None
        same_size = [cell for cell in cells(of_net) if cell.workers == at.workers]
        compared = [cell for cell in same_size if len(ran(of_net, cell)) > 1]
        steps += [step_bars(ran(of_net, cell), looks) for cell in compared]
        sizes += byte_bars(ran(of_net, at), looks) if at in compared else []
    return [*plots, *steps, *sizes]


def _name(kind: str, cell: Cell, *, workers: bool = True) -> str:
    rate = None if cell.rate_bits_per_s is None else as_rate(cell.rate_bits_per_s).removesuffix("/s")
    return slug(kind, net_words(cell.net), rate, f"p{cell.workers}" if workers else None)


def efficiency(here: Sequence[Timing], looks: Looks) -> Plot:
    """Efficiency against workers, for one net and rate."""
    cell = here[0].cell
    shown = [timing for timing in here if timing.efficiency is not None and timing.family != "ceiling"]
    worker_counts = sorted({timing.cell.workers for timing in shown})
    if len(worker_counts) == 1:
        return _efficiency_bars(shown, looks)
    plot = new_plot(
        _name("efficiency", cell, workers=False),
        "Efficiency against workers",
        place(cell, workers=False),
        "Step time of the ceiling, which sends nothing, over the step time measured; median and quartiles.",
    )
    axes, ends = plot.axes, []
    for system in dict.fromkeys(timing.system for timing in shown):
        line = sorted((t for t in shown if t.system == system), key=lambda t: t.cell.workers)
        points = [(worker_counts.index(t.cell.workers), t.efficiency, t) for t in line if t.efficiency]
        look, where = looks[system], [x for x, _, _ in points]
        axes.plot(where, [e.median for _, e, _ in points], color=look.colour, linewidth=look.width)
        for x, e, timing in points:
            axes.plot([x, x], [e.low, e.high], color=look.colour, linewidth=0.9)
            [dot] = axes.plot([x], [e.median], color=look.colour, marker=look.marker, markersize=4.5)
            plot.tip(dot, f"{system}, {place(timing.cell)}: {as_percent(e.median)}")
        ends.append((points[-1][1].median, system, look.colour))
    axes.axhline(1.0, color=INK, linewidth=0.9)
    axes.set_xticks(range(len(worker_counts)), [str(workers) for workers in worker_counts])
    axes.set_xlim(-0.15, len(worker_counts) - 0.85)
    axes.set_ylim(0, max([1.05, *(1.05 * t.efficiency.high for t in shown if t.efficiency)]))
    axes.set_xlabel("workers")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(axis="y")
    end_labels(axes, [*ends, (1.0, "ceiling", INK)])
    return plot


def _efficiency_bars(shown: Sequence[Timing], looks: Looks) -> Plot:
    plot = bar_plot(
        _name("efficiency", shown[0].cell),
        "Efficiency",
        place(shown[0].cell),
        "Step time of the ceiling, which sends nothing, over the step time measured; median and quartiles.",
        [t.system for t in shown],
    )
    for row, timing in enumerate(shown):
        assert timing.efficiency is not None
        [bar] = plot.axes.barh(row, timing.efficiency.median, color=looks[timing.system].colour, height=THICK)
        plot.tip(bar, f"{timing.system}: {as_percent(timing.efficiency.median)}")
        whisker(plot, row, timing.efficiency)
        at_end(plot, row, timing.efficiency.high, as_percent(timing.efficiency.median))
    plot.axes.axvline(1.0, color=INK, linewidth=0.9)
    plot.axes.annotate("ceiling", (1.0, -0.55), ha="center", va="bottom", annotation_clip=False, fontsize=7.5)
    plot.axes.set_xlim(0, max([1.15, *(t.efficiency.high * 1.18 for t in shown if t.efficiency)]))
    plot.axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    plot.axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    plot.axes.set_xlabel("of the ceiling's speed")
    return plot


def step_bars(here: Sequence[Timing], looks: Looks) -> Plot:
    """Where the seconds of a step go, for one cell."""
    plot = bar_plot(
        _name("step-time", here[0].cell),
        "Step time",
        place(here[0].cell),
        "Grey: compute. Full colour: waiting for the wire (exposed). Light: compressing and all the rest. "
        "Hatched: everything beyond compute, where a system does not tell its waiting apart. "
        "Whiskers: quartiles.",
        [t.system for t in here],
    )
    unit, size = ("ms", 1e3) if max(t.median_s for t in here) < 0.2 else ("s", 1.0)
    for row, timing in enumerate(here):
        colour = looks[timing.system].colour
        compute_s = min(timing.compute_s, timing.median_s)
        exposed_s = min(timing.exposed_s or 0.0, timing.median_s - compute_s)
        other_s = timing.median_s - compute_s - exposed_s
        told = timing.exposed_s is not None or timing.family == "ceiling"
        bars = [*plot.axes.barh(row, compute_s * size, color=COMPUTE, height=THICK)]
        left = compute_s * size
        bars += plot.axes.barh(row, exposed_s * size, left=left, color=colour, height=THICK)
        left += exposed_s * size
        rest = plot.axes.barh(row, other_s * size, left=left, color=colour, height=THICK)
        light = {"alpha": 0.38} if told else {"fill": False, "hatch": "/////", "edgecolor": colour}
        rest.patches[0].set(linewidth=0 if told else 0.8, **light)
        bars += rest
        for bar in bars:
            plot.tip(bar, f"{timing.system}: {_split(timing)}")
        assert timing.step_s is not None
        whisker(plot, row, timing.step_s, size)
        at_end(plot, row, timing.step_s.high * size, as_seconds(timing.median_s))
    plot.axes.set_xlim(0, 1.2 * size * max(t.step_s.high for t in here if t.step_s))
    plot.axes.set_xlabel(f"{unit} per step")
    return plot


def _split(timing: Timing) -> str:
    parts = [f"{as_seconds(timing.median_s)} per step", f"compute {as_seconds(timing.compute_s)}"]
    if timing.exposed_s is not None:
        parts.append(f"exposed {as_seconds(timing.exposed_s)}")
    return ", ".join([*parts, f"other {as_seconds(timing.other_s)}"])


def byte_bars(here: Sequence[Timing], looks: Looks) -> list[Plot]:
    """What a worker sends per step, for one cell; no plot if nobody counted, or nobody sent."""
    shown = [t for t in here if t.sent_bytes is not None and t.family != "ceiling"]
    most = max((t.sent_bytes or 0.0 for t in shown), default=0.0)
    if most == 0:
        return []
    plot = bar_plot(
        _name("bytes", here[0].cell),
        "Bytes per step and worker",
        place(here[0].cell),
        "What one worker puts on the wire, on average over its steps.",
        [t.system for t in shown],
    )
    for row, timing in enumerate(shown):
        sent = timing.sent_bytes or 0.0
        [bar] = plot.axes.barh(row, sent, color=looks[timing.system].colour, height=THICK)
        plot.tip(bar, f"{timing.system}: {as_bytes(sent)}")
        at_end(plot, row, sent, as_bytes(sent))
    plot.axes.set_xlim(0, 1.22 * most)
    plot.axes.xaxis.set_major_formatter(lambda sent, _: _rounded(as_bytes(sent)))
    return [plot]


def _rounded(size: str) -> str:
    """A round number of bytes, as an axis has them, without the zeros: `7.50 MB` is `7.5 MB`."""
    number, _, unit = size.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
