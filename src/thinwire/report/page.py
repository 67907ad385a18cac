"""Writes a self-contained HTML page without scripts, and its plots, into the folder they are about."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import DataError
from thinwire.events import FOLDER
from thinwire.report import drawing
from thinwire.report.cells import headline
from thinwire.report.drawing import COLOURS, Plot
from thinwire.report.facts import as_date, what_was_run
from thinwire.report.markup import Html, join, tag
from thinwire.report.run_plots import run_plots, worker_bars
from thinwire.report.runs import Run
from thinwire.report.step_plots import step_plots
from thinwire.report.subject import Subject, read_subject
from thinwire.report.tables import run_table, step_tables, worker_table
from thinwire.report.verdict import key_numbers, verdict
from thinwire.units import as_seconds, count

PAGE = "report.html"
PLOTS = "plots"
STYLE = Path(__file__).with_name("style.css")


@dataclass(frozen=True, slots=True)
class WrittenReport:
    """The files of a report, and its main statements."""

    page: Path
    plots: tuple[Path, ...]
    verdict: str
    notices: tuple[str, ...]


def write_report(folder: Path, progress: Callable[[str], object] = lambda words: None) -> WrittenReport:
    """Write `report.html` and `plots/` into a folder of runs or a benchmark; `progress` gets what is done."""
    with drawing.style():
        subject = read_subject(folder)
        plots = draw(subject)
        progress(f"drawing {count(len(plots), 'plot')} into {folder / PLOTS}")
        try:
            (folder / PLOTS).mkdir(exist_ok=True)
            drawn = [(plot, drawing.save(plot, folder / PLOTS)) for plot in plots]
            (folder / PAGE).write_text(page(subject, drawn), encoding="utf-8")
        except OSError as error:
            raise DataError(f"the report cannot be written into {folder}: {error.strerror}") from error
    made = [folder / PLOTS / f"{plot.name}.{ending}" for plot, _ in drawn for ending in ("svg", "png")]
    return WrittenReport(folder / PAGE, tuple(made), verdict(subject), tuple(notices(subject)))


def draw(subject: Subject) -> list[Plot]:
    """All plots of the page; a system looks the same in all of them."""
    timed = [(timing.system, timing.family) for timing in subject.timings]
    looks = drawing.looks_of([*timed, *((run.system, run.family) for run in subject.runs)])
    steps = step_plots(subject.timings, looks)
    curves = [plot for compared in subject.comparisons for plot in run_plots(compared, looks)]
    plots = [*steps, *curves] if subject.is_bench else [*curves, *steps]
    plots += worker_bars(subject.only_run, looks) if subject.only_run else []
    taken: Counter[str] = Counter()
    for plot in plots:  # names that only differ in what a file name cannot hold
        taken[plot.name] += 1
        plot.name += f"-{taken[plot.name]}" if taken[plot.name] > 1 else ""
    return plots


def page(subject: Subject, plots: Sequence[tuple[Plot, Html]]) -> Html:
    """The whole document, with the plots as they were drawn."""
    heading = title(subject)
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    style = f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    style += f"@media print {{ :root {{ {light} }} }}\n"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{heading} - thinwire report"),
        tag("style", Html(style + STYLE.read_text(encoding="utf-8"))),
    )
    top = tag(
        "header",
        tag("p", "thinwire report", class_="eyebrow"),
        tag("h1", heading),
        tag("p", verdict(subject), class_="verdict"),
        *(tag("p", words, class_="notice") for words in notices(subject)),
    )
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in what_was_run(subject)]
    tiles = [
        tag("div", tag("span", name), tag("strong", value), tag("small", words), class_="tile")
        for name, value, words in key_numbers(subject)
    ]
    parts = [
        section("What was run", tag("dl", *facts), name="run"),
        section("Key numbers", tag("div", *tiles, class_="tiles"), name="numbers"),
        section("Plots", *_plots(plots), name="plots"),
        *_tables(subject),
        section("Failures", *_failures(subject.runs), name="failures"),
        section("Raw data", *_raw_data(subject), name="data"),
    ]
    body = tag("body", tag("main", top, *parts))
    return Html("<!doctype html>\n" + tag("html", head, body, lang="en") + "\n")


def title(subject: Subject) -> str:
    """The title of the page."""
    if subject.is_bench:
        return f"Benchmark {subject.folder.resolve().name}"
    if (run := subject.only_run) is not None:
        return f"{run.recipe}, {run.system}, {count(run.world_size, 'worker')}"
    recipes = ", ".join(compared.recipe for compared in subject.comparisons)
    return f"{recipes}: {len(subject.runs)} runs compared"


def notices(subject: Subject) -> list[str]:
    """Failures, gaps and other limits of the data that a reader must know first."""
    said = []
    for run in subject.runs:
        if run.state == "failed":
            said.append(f"{run.label} failed; its numbers end with step {run.steps}.")
        elif run.state == "unfinished":
            at = as_date(run.last_time)
            ended = "if it no longer runs, it was ended from outside"
            said.append(f"{run.label} has not finished; its last event is of {at} ({ended}).")
        told = run.summary.instruments if run.summary is not None else {}
        sparse_s, dense_s = told.get("sparse_s", 0.0), told.get("dense_s", 0.0)
        if sparse_s > dense_s > 0:  # as top-k strategies tell: both are 0 until they know
            said.append(
                f"{run.label} did not pay there: selecting and sending took {as_seconds(sparse_s)} of "
                "every step, sending everything with all-reduce would have taken about "
                f"{as_seconds(dense_s)}."
            )
        if run.summary is not None and run.summary.advice:
            said.append(f"{run.label}: {run.summary.advice}.")
    if any(timing.emulated for timing in subject.timings):
        said.append("Compute was emulated: layers wait as long as an accelerator would take. Bytes are real.")
    if any(timing.processor_full for timing in subject.timings):
        said.append("In cells marked as such the processors of the machine, not the wire, set the time.")
    missing = {t.system: t.unavailable for t in subject.timings if t.unavailable}
    said += [f"{system} could not run: {reason}." for system, reason in missing.items()]
    if subject.skipped:
        said.append(f"{count(subject.skipped, 'line')} of events could not be read and were left out.")
    return [*said, *subject.notes]


def section(heading: str, *content: Html, name: str) -> Html:
    """A part of the page with its heading; nothing if it is empty."""
    return tag("section", tag("h2", heading), *content, id=name) if content else Html()


def _plots(plots: Sequence[tuple[Plot, Html]]) -> list[Html]:
    """Plots of one kind side by side under a heading, then those that are the only one of their kind."""
    kinds: dict[str, list[tuple[Plot, Html]]] = {}
    for plot, svg in plots:
        kinds.setdefault(plot.title, []).append((plot, svg))
    parts, alone = [], []
    for heading, same in kinds.items():
        figures = [(tag("h4", plot.about), svg) for plot, svg in same]
        caption = same[0][0].caption
        if len(same) > 1:
            parts += [tag("h3", heading), tag("p", caption, class_="caption")]
            parts.append(tag("div", *(tag("figure", *figure) for figure in figures), class_="plots"))
        else:
            alone.append(tag("figure", tag("h3", heading), *figures[0], tag("figcaption", caption)))
    return [*parts, tag("div", *alone, class_="plots")] if alone else parts


def _tables(subject: Subject) -> list[Html]:
    parts, runs = [], subject.runs
    if subject.is_bench:
        words = "Per step and worker. Median over turns, with quartiles in brackets."
        tables = step_tables(subject.timings, headline(subject.timings))
        parts.append(section("Step time", tag("p", words, class_="caption"), *tables, name="steps"))
    if subject.only_run is None:
        tables = [join([tag("h3", each.recipe), run_table(each)]) for each in subject.comparisons]
        parts.append(section("Trainings", *tables, name="trainings"))
    workers = [worker_table(run) for run in runs]
    if len(runs) > 1:
        pairs = zip(runs, workers, strict=True)
        workers = [tag("details", tag("summary", run.label), table) for run, table in pairs]
    return [*parts, section("Workers", *workers, name="workers")]


def _failures(runs: Sequence[Run]) -> list[Html]:
    items = []
    for label, (event, failed) in ((run.label, pair) for run in runs for pair in run.failures):
        who = f"{label}: worker {event.rank} on {failed.host}, {as_date(event.time)}"
        kind = "follows from another worker's failure" if failed.consequence else failed.error
        hint = [tag("p", f"hint: {failed.hint}")] if failed.hint else []
        items.append(tag("li", tag("strong", who), f" ({kind})", tag("pre", failed.message), *hint))
    return [tag("ul", *items)] if items else []


def _raw_data(subject: Subject) -> list[Html]:
    folders = [*(run.folder for run in subject.runs), *([subject.folder] if subject.is_bench else [])]
    kept = [(run.label, run.facts or dict(run.config)) for run in subject.runs]
    kept += [("the benchmark", subject.facts)] if subject.facts else []
    return [
        tag("p", "One JSON record per line, one file per worker. The plots are beside this page, in plots/."),
        tag("ul", *(tag("li", tag("code", str(folder / FOLDER))) for folder in folders)),
        *(
            tag(
                "details",
                tag("summary", f"configuration of {label}"),
                tag("pre", json.dumps(facts, indent=2, default=str)),
            )
            for label, facts in kept
        ),
    ]
