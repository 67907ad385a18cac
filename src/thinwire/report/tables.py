"""HTML, escaped by type (`Html` is markup, a plain `str` is escaped), and the tables of a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape

from thinwire.report.plots import MOST_WORKERS, slowest
from thinwire.report.runs import Run
from thinwire.report.subject import Comparison, timings_of
from thinwire.timings import GridCell, Timing, cells, median_or_dash, place
from thinwire.units import as_bytes, as_metric, as_percent, as_seconds, three_digits

UNKNOWN = "-"
MOST_OPEN = 4
"""Most tables of step times that are shown unfolded."""
STRAGGLES = 1.2
"""Compute per step, relative to the median, above which a worker is called slow."""


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str | None) -> Html:
    """An element. A trailing underscore in an attribute's name is left out; None leaves the attribute out.

    >>> tag("p", "1 < 2 ", tag("b", "yes"), class_="note")
    '<p class="note">1 &lt; 2 <b>yes</b></p>'
    """
    given = [(key.rstrip("_"), value) for key, value in attributes.items() if value is not None]
    written = "".join(f' {key}="{escape(value)}"' for key, value in given)
    if name == "meta":  # has no end
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other, text among them escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", words: Sequence[str] = ()
) -> Html:
    """A table whose first column names the row; the others hold numbers, but for those named in `words`."""
    kinds = ["words" if name in words else None for name in head]
    cells = [tag("th", text, scope="col", class_=kind) for text, kind in zip(head, kinds, strict=True)]
    body = []
    for first, *rest in rows:
        values = [tag("td", text, class_=kind) for text, kind in zip(rest, kinds[1:], strict=True)]
        body.append(tag("tr", tag("th", first, scope="row"), *values))
    heading = tag("thead", tag("tr", *cells))
    title = [tag("caption", caption)] if caption else []
    return tag("div", tag("table", *title, heading, tag("tbody", *body)), class_="scroll")


def step_tables(found: Sequence[Timing], at: GridCell | None) -> list[Html]:
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
    step, full = timing.step_s, " (processor full)" if timing.processor_full else ""
    quartiles = f" [{as_seconds(step.low)}, {as_seconds(step.high)}]" if step.count > 1 else ""
    return [
        timing.system,
        as_seconds(step.median) + quartiles + full,
        median_or_dash(timing.efficiency, as_percent),
        median_or_dash(timing.exposed_s, as_seconds),
        median_or_dash(timing.processor_s, as_seconds),
        median_or_dash(timing.sent_bytes, as_bytes),
        median_or_dash(timing.messages, lambda messages: f"{messages:,.1f}".removesuffix(".0")),
    ]


def run_table(compared: Comparison) -> Html:
    efficiencies = {(t.system, t.workers): t.efficiency for t in timings_of(compared.runs)}
    target, metric, unit = compared.target, compared.metric, compared.seconds
    head = ["run", "workers", metric, f"{unit} to target", f"{unit} of training", "samples/s", "efficiency"]
    head += ["exposed", "sent per step", "state"]
    rows = []
    for run in compared.runs:
        values, to_target = run.values(), target.seconds(run) if target else None
        rows.append(
            [
                run.label,
                str(run.world_size),
                as_metric(metric, values[-1][1]) if values else UNKNOWN,
                UNKNOWN if to_target is None else three_digits(to_target),
                three_digits(run.train_s),
                f"{run.samples_per_s:,.0f}",
                median_or_dash(efficiencies.get((run.system, run.world_size)), as_percent),
                UNKNOWN if run.exposed_share is None else as_percent(run.exposed_share),
                as_bytes(run.per_step("sent_bytes")),
                run.state,
            ]
        )
    return table(head, rows, words=["state"])


def worker_table(run: Run) -> Html:
    """Steps, speed and exposed time of each worker."""
    shown = slowest(run)
    normal = statistics.median([w.compute_s / w.steps for w in run.workers if w.steps] or [0.0])
    rows = []
    for worker in shown:
        step_s = worker.compute_s / worker.steps if worker.steps else 0.0
        slower = step_s / normal if normal else 0.0
        rows.append(
            [
                str(worker.rank),
                worker.host,
                f"{worker.steps:,}",
                f"{worker.samples_per_s:,.0f}",
                as_seconds(step_s) if worker.steps else UNKNOWN,
                as_percent(worker.exposed_share),
                as_bytes(worker.sent_bytes),
                f"slow: computes {three_digits(slower)}x as long as the median" if slower > STRAGGLES else "",
            ]
        )
    head = ["worker", "host", "steps", "samples/s", "compute per step", "exposed", "sent", "remark"]
    many = f"The {MOST_WORKERS} of {len(run.workers)} workers that compute longest."
    return table(head, rows, caption=many if len(shown) < len(run.workers) else "", words=["host", "remark"])
