"""The plots of a page: curves of trainings, the time of each worker, efficiency, step times and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from thinwire.report import drawing
from thinwire.report.drawing import COLOURS, COMPUTE, DASHES, INK, MUTED, Label, Looks, Plot
from thinwire.report.runs import Point, Run, WorkerRecord
from thinwire.report.subject import Comparison
from thinwire.timings import GridCell, Timing, cells, headline, net_words, place, ran
from thinwire.units import as_bytes, as_metric, as_percent, as_rate, as_seconds

Curves = Sequence[Sequence[Point]]
MOST_POINTS = 300
"""Most points of a curve; longer ones are averaged down."""
MOST_WORKERS = 24
"""Most workers in a plot or a table: the slowest are shown."""
WIDTHS = [COLOURS[f"ours-{number}"][0] for number in range(1, 9)]
"""Colours of layers."""
LOG_FROM = 20.0
"""Ratio of largest to smallest loss above which the scale is logarithmic."""
EFFICIENCY = (
    "Step time of the ceiling, which sends nothing, over the step time measured; median and quartiles."
)
STEP_TIME = (
    "Grey: compute. Full colour: waiting for the wire (exposed). Light: compressing and all the rest. "
    "Hatched: everything beyond compute, where a system does not tell its waiting apart. "
    "Whiskers: quartiles."
)
WORKER_TIME = (
    "Grey: compute, and everything else that is not waiting. Colour: waiting for the wire (exposed). "
    "A slow worker computes longest and waits least, while the others wait for it."
)


def run_plots(compared: Comparison, looks: Looks) -> list[Plot]:
    """Loss, metric and distance in the trainings of one recipe; plots without any record are left out."""
    runs = compared.runs
    plots = [_losses(compared, looks)] if any(run.losses() for run in runs) else []
    if any(run.values() for run in runs):
        plots.append(_metric(compared, looks, "train_s"))
    if len(runs) > 1 and any(len(run.values()) > 1 for run in runs):
        plots.append(_metric(compared, looks, "epoch"))
    distances = [run.distances() for run in runs]
    if any(apart > 0 for curve in distances for _, apart in curve):
        caption = "Root mean square distance of the workers' models from their mean, relative to it."
        name, title = f"distance-{compared.recipe}", "How far replicas are apart"
        plot = drawing.new_plot(name, title, compared.recipe, caption)
        plot.axes.set(xlabel="epochs", ylabel="distance from the mean model")
        plots.append(_draw(plot, runs, distances, looks, None, from_zero=True))
    return plots + [_widths(run) for run in runs if run.widths()]


def _widths(run: Run) -> Plot:
    """How wide every layer was, epoch by epoch."""
    name, about = f"widths-{run.folder.name}", f"{run.recipe}, {run.label}"
    caption = "Neurons left in every layer that apoptosis may shrink, after each of its events."
    plot = drawing.new_plot(name, "Layer widths against epochs", about, caption)
    ends = []
    for at, (layer, curve) in enumerate(run.widths().items()):
        colour = WIDTHS[at % len(WIDTHS)]
        places, heights = zip(*curve, strict=True)
        [line] = plot.axes.step(places, heights, where="post", color=colour, linewidth=1.6)
        plot.tip(line, f"layer {layer}: {heights[0]:,.0f} to {heights[-1]:,.0f} neurons")
        ends.append((heights[-1], layer, colour))
    plot.axes.set(xlabel="epochs", ylabel="neurons")
    plot.axes.set_xlim(left=0)
    plot.axes.set_ylim(bottom=0)
    plot.axes.grid(axis="y")
    drawing.end_labels(plot.axes, ends)
    return plot


def thinned(points: Sequence[Point]) -> list[Point]:
    """A curve of at most MOST_POINTS points, each the mean of a few neighbours."""
    size = -(-len(points) // MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _losses(compared: Comparison, looks: Looks) -> Plot:
    curves = [thinned(run.losses()) for run in compared.runs]
    positive = [y for curve in curves for _, y in curve if y > 0]
    log = bool(positive) and max(positive) > LOG_FROM * min(positive)
    title = f"Training loss against {compared.seconds}"
    caption = "Mean over workers. Seconds of training: evaluation is left out."
    plot = drawing.new_plot(f"loss-{compared.recipe}", title, compared.recipe, caption)
    plot.axes.set(xlabel=f"{compared.seconds} of training", ylabel="training loss")
    if log:
        plot.axes.set_ylabel("training loss, log scale")
        plot.axes.set_yscale("log")
        plot.axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
    return _draw(plot, compared.runs, curves, looks, None, from_zero=not log)


def _metric(compared: Comparison, looks: Looks, by: Literal["train_s", "epoch"]) -> Plot:
    kind, against, unit = "metric", compared.seconds, f"{compared.seconds} of training"
    if by == "epoch":
        kind, against, unit = "metric-by-epoch", "epochs", "epochs"
    metric, target = compared.metric, compared.target
    caption = "On the test data, over all workers." + (" Thin line: the target." if target else "")
    title = f"Test {metric} against {against}"
    plot = drawing.new_plot(f"{kind}-{compared.recipe}", title, compared.recipe, caption)
    line = None if target is None else (target.value, f"target {as_metric(metric, target.value)}", MUTED)
    if metric == "accuracy":
        plot.axes.yaxis.set_major_formatter(lambda share, _: as_percent(share))
    plot.axes.set(xlabel=unit, ylabel=f"test {metric}")
    curves = [run.values(by) for run in compared.runs]
    return _draw(plot, compared.runs, curves, looks, line, from_zero=False)


def _draw(
    plot: Plot, runs: Sequence[Run], curves: Curves, looks: Looks, target: Label | None, *, from_zero: bool
) -> Plot:
    """Draw a named curve per run, and a horizontal line at the target."""
    drawn: Counter[str] = Counter()
    ends = []
    for run, curve in zip(runs, curves, strict=True):
        if not curve:
            continue
        look = looks[run.system]
        places, heights = zip(*curve, strict=True)
        [line] = plot.axes.plot(
            places,
            heights,
            color=look.colour,
            linewidth=min(look.width, 1.6),
            dashes=DASHES[drawn[run.system] % len(DASHES)],
            marker=(look.marker or "o") if len(curve) == 1 else "",
        )
        drawn[run.system] += 1
        plot.tip(line, run.label)
        ends.append((heights[-1], run.label, look.colour))
    if target is not None:
        plot.axes.axhline(target[0], color=target[2], linewidth=0.8)
    plot.axes.set_xlim(left=0)
    if from_zero:
        plot.axes.set_ylim(bottom=0)
    plot.axes.grid(axis="y")
    drawing.end_labels(plot.axes, [*(ends if len(runs) > 1 else []), *([target] if target else [])])
    return plot


def slowest(run: Run) -> list[WorkerRecord]:
    """The workers of a run by rank; if there are very many, those that compute longest."""
    longest = sorted(run.workers, key=lambda w: w.compute_s / max(w.steps, 1), reverse=True)
    return sorted(longest[:MOST_WORKERS], key=lambda w: w.rank)


def worker_bars(run: Run, looks: Looks) -> list[Plot]:
    """Compute and exposed seconds of each worker; no plot before the first progress."""
    workers = [w for w in slowest(run) if w.train_s > 0]
    if not workers:
        return []
    colour = looks[run.system].colour
    name, about = f"workers-{run.folder.name}", f"{run.recipe}, {run.label}"
    rows = [f"worker {worker.rank}" for worker in workers]
    plot = drawing.bar_plot(name, "How workers spent their time", about, WORKER_TIME, rows)
    for row, worker in enumerate(workers):
        words = f"compute {as_seconds(worker.compute_s)}, exposed {as_seconds(worker.exposed_s)}"
        tip = f"worker {worker.rank} on {worker.host}: {words}"
        parts = [(worker.compute_s, COMPUTE), (worker.exposed_s, colour if colour != INK else MUTED)]
        drawing.bar(plot, row, parts, tip, f"{as_percent(worker.exposed_share)} exposed")
    plot.axes.set_xlim(0, 1.3 * max(worker.train_s for worker in workers))
    plot.axes.set_xlabel(f"{run.seconds} of training")
    return [plot]


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
    return drawing.bar_plot(name, title, place(cell), caption, [timing.system for timing in shown])


def efficiency(shown: Sequence[Timing], looks: Looks) -> Plot:
    cell, worker_counts = shown[0].cell, sorted({timing.workers for timing in shown})
    about = place(cell, workers=False)
    plot = drawing.new_plot(_name("efficiency", cell), "Efficiency against workers", about, EFFICIENCY)
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
    drawing.end_labels(axes, [*ends, (1.0, "ceiling", INK)])
    return plot


def efficiency_bars(shown: Sequence[Timing], looks: Looks) -> Plot:
    plot = _bars("efficiency", "Efficiency", shown, EFFICIENCY)
    for row, timing in enumerate(shown):
        assert timing.efficiency is not None
        share, shown_share = timing.efficiency, as_percent(timing.efficiency.median)
        parts = [(share.median, looks[timing.system].colour)]
        drawing.bar(plot, row, parts, f"{timing.system}: {shown_share}", shown_share, (share.low, share.high))
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
        tip = f"{timing.system}: {', '.join(words)}"
        rest = drawing.bar(plot, row, parts, tip, as_seconds(step_s), quartiles)
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
        drawing.bar(plot, row, [(sent, looks[timing.system].colour)], tip, as_bytes(sent))
    plot.axes.set_xlim(0, 1.22 * max(sizes))
    plot.axes.xaxis.set_major_formatter(lambda sent, _: _rounded(as_bytes(sent)))
    return [plot]


def _rounded(size: str) -> str:
    """A size without trailing zeros, for an axis: `7.50 MB` becomes `7.5 MB`."""
    number, _, unit = size.partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
