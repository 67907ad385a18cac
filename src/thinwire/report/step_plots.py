"""Plots of step times: efficiency against workers, the parts of a step, bytes per step."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.report.cells import cells, headline, net_words, place, ran
from thinwire.report.drawing import COMPUTE, INK, Looks, Plot, bar, bar_plot, end_labels, new_plot
from thinwire.timings import GridCell, Timing
from thinwire.units import as_bytes, as_percent, as_rate, as_seconds

EFFICIENCY = (
    "Step time of the ceiling, which sends nothing, over the step time measured; median and quartiles."
)
STEP_TIME = (
    "Grey: compute. Full colour: waiting for the wire (exposed). Light: compressing and all the rest. "
    "Hatched: everything beyond compute, where a system does not tell its waiting apart. "
    "Whiskers: quartiles."
)


def step_plots(found: Sequence[Timing], looks: Looks) -> list[Plot]:
    """Efficiency for every net and rate; step time and bytes for the headline's number of workers."""
    measured = ran(found)
    plots = []
    for net, rate in dict.fromkeys((cell.net, cell.rate_bits_per_s) for cell in cells(measured)):
        here = [t for t in measured if (t.net, t.rate_bits_per_s) == (net, rate)]
        shown = [t for t in here if t.efficiency is not None and t.family != "ceiling"]
        if len({t.workers for t in shown}) > 1:
            plots.append(efficiency(shown, looks))
        elif shown:
            plots.append(efficiency_bars(shown, looks))
    steps, sizes = [], []
    for net in dict.fromkeys(timing.net for timing in measured):
        of_net = [timing for timing in measured if timing.net == net]
        at = headline(of_net)
        assert at is not None
        compared = [c for c in cells(of_net) if c.workers == at.workers and len(ran(of_net, c)) > 1]
        steps += [step_bars(ran(of_net, cell), looks) for cell in compared]
        sizes += byte_bars(ran(of_net, at), looks) if at in compared else []
    return [*plots, *steps, *sizes]


def _name(kind: str, cell: GridCell) -> str:
    rate = [] if cell.rate_bits_per_s is None else [as_rate(cell.rate_bits_per_s).removesuffix("/s")]
    return "-".join([kind, net_words(cell.net), *rate])


def _bars(kind: str, title: str, shown: Sequence[Timing], caption: str) -> Plot:
    cell = shown[0].cell
    name = f"{_name(kind, cell)}-p{cell.workers}"
    return bar_plot(name, title, place(cell), caption, [timing.system for timing in shown])


def efficiency(shown: Sequence[Timing], looks: Looks) -> Plot:
    """Efficiency against workers, for one net and rate."""
    cell, worker_counts = shown[0].cell, sorted({timing.workers for timing in shown})
    about = place(cell, workers=False)
    plot = new_plot(_name("efficiency", cell), "Efficiency against workers", about, EFFICIENCY)
    axes, ends = plot.axes, []
    for system in dict.fromkeys(timing.system for timing in shown):
        line = sorted((t for t in shown if t.system == system), key=lambda t: t.workers)
        points = [(worker_counts.index(t.workers), t.efficiency, t.cell) for t in line if t.efficiency]
        look, where = looks[system], [x for x, _, _ in points]
        axes.plot(where, [e.median for _, e, _ in points], color=look.colour, linewidth=look.width)
        for x, e, at in points:
            axes.plot([x, x], [e.low, e.high], color=look.colour, linewidth=0.9)
            [dot] = axes.plot([x], [e.median], color=look.colour, marker=look.marker, markersize=4.5)
            plot.tip(dot, f"{system}, {place(at)}: {as_percent(e.median)}")
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


def efficiency_bars(shown: Sequence[Timing], looks: Looks) -> Plot:
    """Efficiency for one cell."""
    plot = _bars("efficiency", "Efficiency", shown, EFFICIENCY)
    for row, timing in enumerate(shown):
        assert timing.efficiency is not None
        share, shown_share = timing.efficiency, as_percent(timing.efficiency.median)
        parts = [(share.median, looks[timing.system].colour)]
        bar(plot, row, parts, f"{timing.system}: {shown_share}", shown_share, (share.low, share.high))
    plot.axes.axvline(1.0, color=INK, linewidth=0.9)
    plot.axes.annotate("ceiling", (1.0, -0.55), ha="center", va="bottom", annotation_clip=False, fontsize=7.5)
    plot.axes.set_xlim(0, max([1.15, *(t.efficiency.high * 1.18 for t in shown if t.efficiency)]))
    plot.axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    plot.axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    plot.axes.set_xlabel("of the ceiling's speed")
    return plot


def step_bars(here: Sequence[Timing], looks: Looks) -> Plot:
    """The parts of a step's time, for one cell."""
    plot = _bars("step-time", "Step time", here, STEP_TIME)
    unit, size = ("ms", 1e3) if max(t.median_s for t in here) < 0.2 else ("s", 1.0)
    for row, timing in enumerate(here):
        assert timing.step_s is not None
        step_s, colour = timing.median_s, looks[timing.system].colour
        waited_s = 0.0 if timing.exposed_s is None else timing.exposed_s.median
        compute_s = min(timing.compute_s, step_s)
        exposed_s = min(waited_s, step_s - compute_s)
        other_s = step_s - compute_s - exposed_s
        words = [f"{as_seconds(step_s)} per step", f"compute {as_seconds(timing.compute_s)}"]
        words += [] if timing.exposed_s is None else [f"exposed {as_seconds(waited_s)}"]
        words.append(f"other {as_seconds(max(step_s - timing.compute_s - waited_s, 0.0))}")
        parts = [(compute_s * size, COMPUTE), (exposed_s * size, colour), (other_s * size, colour)]
        quartiles = timing.step_s.low * size, timing.step_s.high * size
        rest = bar(plot, row, parts, f"{timing.system}: {', '.join(words)}", as_seconds(step_s), quartiles)
        told = timing.exposed_s is not None or timing.family == "ceiling"
        light = {"alpha": 0.38} if told else {"fill": False, "hatch": "/////", "edgecolor": colour}
        rest.set(linewidth=0 if told else 0.8, **light)
    plot.axes.set_xlim(0, 1.2 * size * max(t.step_s.high for t in here if t.step_s))
    plot.axes.set_xlabel(f"{unit} per step")
    return plot


def byte_bars(here: Sequence[Timing], looks: Looks) -> list[Plot]:
    """Bytes sent per step, for one cell; no plot if none were counted or sent."""
    shown = [t for t in here if t.sent_bytes is not None and t.family != "ceiling"]
    sizes = [t.sent_bytes.median for t in shown if t.sent_bytes is not None]
    if not any(sizes):
        return []
    caption = "What one worker puts on the wire, on average over its steps."
    plot = _bars("bytes", "Bytes per step and worker", shown, caption)
    for row, (timing, sent) in enumerate(zip(shown, sizes, strict=True)):
        tip = f"{timing.system}: {as_bytes(sent)}"
        bar(plot, row, [(sent, looks[timing.system].colour)], tip, as_bytes(sent))
    plot.axes.set_xlim(0, 1.22 * max(sizes))
    plot.axes.xaxis.set_major_formatter(lambda sent, _: _rounded(as_bytes(sent)))
    return [plot]


def _rounded(size: str) -> str:
    """A size without trailing zeros, for an axis: `7.50 MB` becomes `7.5 MB`."""
    number, _, unit = size.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
