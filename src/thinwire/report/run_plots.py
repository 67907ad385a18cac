"""Plots of trainings: loss and metric against seconds and epochs, and the time of each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from thinwire.report import drawing
from thinwire.report.drawing import COMPUTE, DASHES, INK, MUTED, Looks, Plot, end_labels, new_plot
from thinwire.report.runs import Point, Run, WorkerRecord
from thinwire.report.subject import Comparison
from thinwire.units import as_metric, as_percent, as_seconds

MOST_POINTS = 300
"""Most points of a curve; longer ones are averaged down."""
MOST_WORKERS = 24
"""Most workers in a plot or a table: the slowest are shown."""
LOG_FROM = 20.0
"""Ratio of largest to smallest loss above which the scale is logarithmic."""


def run_plots(compared: Comparison, looks: Looks) -> list[Plot]:
    """Loss and metric of the trainings of one recipe; plots without any record are left out."""
    runs, plots = compared.runs, []
    if any(run.losses() for run in runs):
        plots.append(loss_curves(compared, looks))
    if any(run.values() for run in runs):
        plots.append(metric_curves(compared, looks))
    if len(runs) > 1 and any(len(run.values()) > 1 for run in runs):
        plots.append(metric_curves(compared, looks, by_epoch=True))
    if any(apart > 0 for run in runs for _, apart in run.distances()):
        plots.append(distance_curves(compared, looks))
    return plots


def thinned(points: Sequence[Point]) -> list[Point]:
    """A curve of at most MOST_POINTS points, each the mean of a few neighbours."""
    size = -(-len(points) // MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def loss_curves(compared: Comparison, looks: Looks) -> Plot:
    """Training loss against seconds."""
    curves = [thinned(run.losses()) for run in compared.runs]
    positive = [y for curve in curves for _, y in curve if y > 0]
    log = bool(positive) and max(positive) > LOG_FROM * min(positive)
    title = f"Training loss against {compared.seconds}"
    caption = "Mean over workers. Seconds of training: evaluation is left out."
    plot = new_plot(f"loss-{compared.recipe}", title, compared.recipe, caption)
    plot.axes.set_ylabel("training loss" + (", log scale" if log else ""))
    if log:
        plot.axes.set_yscale("log")
        plot.axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
    _draw(plot, compared.runs, curves, looks, f"{compared.seconds} of training", from_zero=not log)
    return plot


def metric_curves(compared: Comparison, looks: Looks, *, by_epoch: bool = False) -> Plot:
    """The test metric against seconds or epochs, with the target."""
    against, kind = ("epochs", "metric-by-epoch") if by_epoch else (compared.seconds, "metric")
    metric, target = compared.metric, compared.target
    title = f"Test {metric} against {against}"
    caption = "On the test data, over all workers." + (" Thin line: the target." if target else "")
    plot = new_plot(f"{kind}-{compared.recipe}", title, compared.recipe, caption)
    lines = [] if target is None else [(target.value, f"target {as_metric(metric, target.value)}", MUTED)]
    if metric == "accuracy":
        plot.axes.yaxis.set_major_formatter(lambda share, _: as_percent(share))
    plot.axes.set_ylabel(f"test {metric}")
    curves = [run.values("epoch" if by_epoch else "train_s") for run in compared.runs]
    _draw(plot, compared.runs, curves, looks, against + ("" if by_epoch else " of training"), lines)
    return plot


def distance_curves(compared: Comparison, looks: Looks) -> Plot:
    """The distance of replicas from their mean, against epochs."""
    caption = "Root mean square distance of the workers' models from their mean, relative to it."
    plot = new_plot(f"distance-{compared.recipe}", "How far replicas are apart", compared.recipe, caption)
    plot.axes.set_ylabel("distance from the mean model")
    _draw(plot, compared.runs, [run.distances() for run in compared.runs], looks, "epochs", from_zero=True)
    return plot


def _draw(
    plot: Plot,
    runs: Sequence[Run],
    curves: Sequence[Sequence[Point]],
    looks: Looks,
    against: str,
    lines: Sequence[tuple[float, str, str]] = (),
    *,
    from_zero: bool = False,
) -> None:
    """Draw a named curve per run, and horizontal lines, given as height, label and colour."""
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
    for height, _, colour in lines:
        plot.axes.axhline(height, color=colour, linewidth=0.8)
    plot.axes.set_xlim(left=0)
    if from_zero:
        plot.axes.set_ylim(bottom=0)
    plot.axes.set_xlabel(against)
    plot.axes.grid(axis="y")
    end_labels(plot.axes, [*(ends if len(runs) > 1 else []), *lines])


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
    plot = drawing.bar_plot(
        f"workers-{run.folder.name}",
        "How workers spent their time",
        f"{run.recipe}, {run.label}",
        "Grey: compute, and everything else that is not waiting. Colour: waiting for the wire (exposed). "
        "A slow worker computes longest and waits least, while the others wait for it.",
        [f"worker {worker.rank}" for worker in workers],
    )
    for row, worker in enumerate(workers):
        words = f"compute {as_seconds(worker.compute_s)}, exposed {as_seconds(worker.exposed_s)}"
        tip = f"worker {worker.rank} on {worker.host}: {words}"
        parts = [(worker.compute_s, COMPUTE), (worker.exposed_s, colour if colour != INK else MUTED)]
        drawing.bar(plot, row, parts, tip, f"{as_percent(worker.exposed_share)} exposed")
    plot.axes.set_xlim(0, 1.3 * max(worker.train_s for worker in workers))
    plot.axes.set_xlabel(f"{run.seconds} of training")
    return [plot]
