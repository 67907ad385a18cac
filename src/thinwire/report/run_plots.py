"""Plots of trainings: loss and metric against seconds and epochs, and how each worker spent its time."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.report.bars import THICK, at_end, bar_plot
from thinwire.report.drawing import Plot, end_labels, new_plot
from thinwire.report.looks import COMPUTE, DASHES, INK, MUTED, Look
from thinwire.report.runs import Point, Run, Worker, seconds_of
from thinwire.report.step_plots import Looks
from thinwire.report.subject import NamedRun
from thinwire.report.target import target_of
from thinwire.report.words import slug
from thinwire.units import as_metric, as_percent, as_seconds

MOST_POINTS = 300
"""Of a curve; a long run is averaged down to as many."""
MOST_WORKERS = 24
"""In a plot or a table of workers: the slowest of them."""
LOG_FROM = 20.0
"""Losses that span more than this are drawn on a log scale."""


def run_plots(trainings: Sequence[NamedRun], looks: Looks) -> list[Plot]:
    """Loss and metric of the trainings of one recipe; those without any record are left out."""
    plots = []
    if any(training.run.losses() for training in trainings):
        plots.append(loss_curves(trainings, looks))
    if any(training.run.values() for training in trainings):
        plots.append(metric_curves(trainings, looks))
    if len(trainings) > 1 and any(len(training.run.values()) > 1 for training in trainings):
        plots.append(metric_curves(trainings, looks, by_epoch=True))
    if any(apart > 0 for training in trainings for _, apart in training.run.distances()):
        plots.append(distance_curves(trainings, looks))
    return plots


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MOST_POINTS, each the mean of a few neighbours."""
    size = -(-len(points) // MOST_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def loss_curves(trainings: Sequence[NamedRun], looks: Looks) -> Plot:
    """Training loss against seconds."""
    run, seconds = trainings[0].run, _seconds(trainings)
    curves = [thinned(training.run.losses()) for training in trainings]
    positive = [y for curve in curves for _, y in curve if y > 0]
    log = bool(positive) and max(positive) > LOG_FROM * min(positive)
    plot = new_plot(
        slug("loss", run.recipe),
        f"Training loss against {seconds}",
        run.recipe,
        "Mean over workers. Seconds of training: evaluation is left out.",
    )
    plot.axes.set_ylabel("training loss" + (", log scale" if log else ""))
    if log:
        plot.axes.set_yscale("log")
        plot.axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:g}")
    _curves(plot, trainings, curves, looks, f"{seconds} of training")
    if not log:
        plot.axes.set_ylim(bottom=0)
    _finish(plot, trainings, curves, looks)
    return plot


def metric_curves(trainings: Sequence[NamedRun], looks: Looks, *, by_epoch: bool = False) -> Plot:
    """The test metric against seconds or epochs, with the target."""
    run, against = trainings[0].run, "epochs" if by_epoch else _seconds(trainings)
    curves = [t.run.values_by_epoch() if by_epoch else t.run.values() for t in trainings]
    metric = next(t.run.evaluated[0].metric for t in trainings if t.run.evaluated)
    target = target_of(training.run for training in trainings)
    plot = new_plot(
        slug("metric", "by-epoch" if by_epoch else None, run.recipe),
        f"Test {metric} against {against}",
        run.recipe,
        "On the test data, over all workers." + (" Thin line: the target." if target else ""),
    )
    _curves(plot, trainings, curves, looks, "epochs" if by_epoch else f"{against} of training")
    extra = []
    if target is not None:
        plot.axes.axhline(target.value, color=MUTED, linewidth=0.8)
        extra = [(target.value, f"target {as_metric(metric, target.value)}", MUTED)]
    if metric == "accuracy":
        plot.axes.yaxis.set_major_formatter(lambda share, _: as_percent(share))
    plot.axes.set_ylabel(f"test {metric}")
    _finish(plot, trainings, curves, looks, extra)
    return plot


def distance_curves(trainings: Sequence[NamedRun], looks: Looks) -> Plot:
    """How far replicas are apart, against epochs."""
    curves = [training.run.distances() for training in trainings]
    plot = new_plot(
        slug("distance", trainings[0].run.recipe),
        "How far replicas are apart",
        trainings[0].run.recipe,
        "Root mean square distance of the workers' models from their mean, relative to it.",
    )
    _curves(plot, trainings, curves, looks, "epochs")
    plot.axes.set_ylabel("distance from the mean model")
    plot.axes.set_ylim(bottom=0)
    _finish(plot, trainings, curves, looks)
    return plot


def _curves(
    plot: Plot, trainings: Sequence[NamedRun], curves: Sequence[Sequence[Point]], looks: Looks, against: str
) -> None:
    drawn: dict[str, int] = {}
    for training, curve in zip(trainings, curves, strict=True):
        if not curve:
            continue
        look, turn = looks[training.system], drawn.setdefault(training.system, 0)
        drawn[training.system] += 1
        places, heights = zip(*curve, strict=True)
        [line] = plot.axes.plot(
            places,
            heights,
            color=look.colour,
            linewidth=min(look.width, 1.6),
            dashes=DASHES[turn % len(DASHES)],
            marker=_marker(look) if len(curve) == 1 else "",
        )
        plot.tip(line, training.label)
    plot.axes.set_xlim(left=0)
    plot.axes.set_xlabel(against)
    plot.axes.grid(axis="y")


def _seconds(trainings: Sequence[NamedRun]) -> str:
    return seconds_of(training.run for training in trainings)


def _marker(look: Look) -> str:
    return look.marker or "o"


def _finish(
    plot: Plot,
    trainings: Sequence[NamedRun],
    curves: Sequence[Sequence[Point]],
    looks: Looks,
    extra: Sequence[tuple[float, str, str]] = (),
) -> None:
    """Name the curves, unless there is only one."""
    ends = [
        (curve[-1][1], training.label, looks[training.system].colour)
        for training, curve in zip(trainings, curves, strict=True)
        if curve
    ]
    end_labels(plot.axes, [*(ends if len(trainings) > 1 else []), *extra])


def slowest(run: Run) -> list[Worker]:
    """The workers of a run by rank; if there are very many, those that compute longest."""
    if len(run.workers) <= MOST_WORKERS:
        return list(run.workers)
    longest = sorted(run.workers, key=lambda w: w.compute_s / max(w.steps, 1), reverse=True)
    return sorted(longest[:MOST_WORKERS], key=lambda w: w.rank)


def worker_bars(training: NamedRun, looks: Looks) -> list[Plot]:
    """How each worker's training seconds were spent; nothing before the first progress."""
    run, workers = training.run, [w for w in slowest(training.run) if w.train_s > 0]
    if not workers:
        return []
    look = looks[training.system]
    colour = look.colour if look.colour != INK else MUTED
    plot = bar_plot(
        slug("workers", run.folder.name),
        "How workers spent their time",
        f"{run.recipe}, {training.label}",
        "Grey: compute, and everything else that is not waiting. Colour: waiting for the wire (exposed). "
        "A slow worker computes longest and waits least, while the others wait for it.",
        [f"worker {worker.rank}" for worker in workers],
    )
    for row, worker in enumerate(workers):
        bars = [*plot.axes.barh(row, worker.compute_s, color=COMPUTE, height=THICK)]
        bars += plot.axes.barh(row, worker.exposed_s, left=worker.compute_s, color=colour, height=THICK)
        for bar in bars:
            words = f"compute {as_seconds(worker.compute_s)}, exposed {as_seconds(worker.exposed_s)}"
            plot.tip(bar, f"worker {worker.rank} on {worker.host}: {words}")
        at_end(plot, row, worker.train_s, f"{as_percent(worker.exposed_share)} exposed")
    plot.axes.set_xlim(0, 1.3 * max(worker.train_s for worker in workers))
    plot.axes.set_xlabel(f"{run.seconds} of training")
    return [plot]
