"""The tables of a page, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from thinwire.report.markup import Html, table, tag
from thinwire.report.run_plots import MOST_WORKERS, slowest
from thinwire.report.runs import Run, seconds_of
from thinwire.report.subject import NamedRun, timings_of
from thinwire.report.target import target_of
from thinwire.report.timings import Cell, Timing, cells
from thinwire.report.words import place
from thinwire.spread import Spread
from thinwire.units import as_bytes, as_metric, as_percent, as_seconds, three_digits

UNKNOWN = "-"
MOST_OPEN = 4
"""Tables of step times that are shown without a click."""
STRAGGLES = 1.2
"""A worker that needs this many times the median's compute seconds per step is called slow."""


def step_tables(found: Sequence[Timing], at: Cell | None) -> list[Html]:
    """One table per cell: every system, those that could not run too. Of many only that of `at` is open."""
    head = ["system", "step", "efficiency", "exposed", "processor", "sent", "messages"]
    known = cells(found)
    return [
        tag(
            "details",
            tag("summary", place(cell)),
            table(head, [_step_row(t) for t in found if t.cell == cell]),
            open="" if cell == at or len(known) <= MOST_OPEN else None,
        )
        for cell in known
    ]


def _step_row(timing: Timing) -> list[str]:
    if timing.step_s is None:
        return [timing.system, timing.unavailable or UNKNOWN, *[UNKNOWN] * 5]
    full = " (processor full)" if timing.processor_full else ""
    return [
        timing.system,
        _spread_s(timing.step_s) + full,
        UNKNOWN if timing.efficiency is None else as_percent(timing.efficiency.median),
        UNKNOWN if timing.exposed_s is None else as_seconds(timing.exposed_s),
        UNKNOWN if timing.processor_s is None else as_seconds(timing.processor_s),
        UNKNOWN if timing.sent_bytes is None else as_bytes(timing.sent_bytes),
        UNKNOWN if timing.messages is None else f"{timing.messages:,.1f}".removesuffix(".0"),
    ]


def _spread_s(spread: Spread) -> str:
    if spread.count == 1:
        return as_seconds(spread.median)
    return f"{as_seconds(spread.median)} [{as_seconds(spread.low)}, {as_seconds(spread.high)}]"


def run_table(trainings: Sequence[NamedRun]) -> Html:
    """The runs of one recipe."""
    efficiencies = {(t.system, t.cell.workers): t.efficiency for t in timings_of(trainings)}
    target = target_of(training.run for training in trainings)
    metric = next((t.run.evaluated[-1].metric for t in trainings if t.run.evaluated), "value")
    unit = seconds_of(training.run for training in trainings)
    head = ["run", "workers", metric, f"{unit} to target", f"{unit} of training", "samples/s", "efficiency"]
    head += ["exposed", "sent per step", "state"]
    rows = []
    for training in trainings:
        run, values = training.run, training.run.values()
        to_target = target.seconds(run) if target else None
        efficiency = efficiencies.get((training.system, run.world_size))
        rows.append(
            [
                training.label,
                str(run.world_size),
                as_metric(metric, values[-1][1]) if values else UNKNOWN,
                UNKNOWN if to_target is None else three_digits(to_target),
                three_digits(run.train_s),
                f"{run.samples_per_s:,.0f}",
                UNKNOWN if efficiency is None else as_percent(efficiency.median),
                UNKNOWN if training.exposed_share is None else as_percent(training.exposed_share),
                as_bytes(run.sent_bytes_per_step),
                run.state,
            ]
        )
    return table(head, rows, words=["state"])


def worker_table(run: Run) -> Html:
    """What each worker did."""
    shown = slowest(run)
    normal = statistics.median([w.compute_s / w.steps for w in run.workers if w.steps] or [0.0])
    rows = []
    for worker in shown:
        slower = worker.compute_s / worker.steps / normal if worker.steps and normal else 0.0
        rows.append(
            [
                str(worker.rank),
                worker.host,
                f"{worker.steps:,}",
                f"{worker.samples_per_s:,.0f}",
                as_seconds(worker.compute_s / worker.steps) if worker.steps else UNKNOWN,
                as_percent(worker.exposed_share),
                as_bytes(worker.sent_bytes),
                f"slow: computes {three_digits(slower)}x as long as the median" if slower > STRAGGLES else "",
            ]
        )
    head = ["worker", "host", "steps", "samples/s", "compute per step", "exposed", "sent", "remark"]
    many = f"The {MOST_WORKERS} of {len(run.workers)} workers that compute longest."
    return table(head, rows, caption=many if len(shown) < len(run.workers) else "", words=["host", "remark"])
