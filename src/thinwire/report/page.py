"""One page: self-contained, without scripts, in the order a reader wants it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from thinwire.events import FOLDER, Failed
from thinwire.report.drawing import Plot
from thinwire.report.facts import as_date, what_was_run
from thinwire.report.looks import variables
from thinwire.report.markup import Html, facts, join, tag
from thinwire.report.subject import NamedRun, Subject
from thinwire.report.tables import run_table, step_tables, worker_table
from thinwire.report.tiles import key_numbers
from thinwire.report.timings import headline
from thinwire.report.verdict import verdict
from thinwire.units import as_seconds, count

STYLE = Path(__file__).with_name("style.css")


def page(subject: Subject, plots: Sequence[tuple[Plot, Html]]) -> Html:
    """The whole document, with the plots as they were drawn."""
    heading = title(subject)
    style = f":root {{ {variables(dark=False)} }}\n"
    style += f"@media (prefers-color-scheme: dark) {{ :root {{ {variables(dark=True)} }} }}\n"
    style += "@media print { :root { " + variables(dark=False) + " } }\n"
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
    parts = [
        section("What was run", facts(what_was_run(subject)), name="run"),
        section("Key numbers", _tiles(key_numbers(subject)), name="numbers"),
        _plots(plots),
        *_tables(subject),
        _workers(subject.trainings),
        _failures(subject.trainings),
        _raw_data(subject),
    ]
    body = tag("body", tag("main", top, *parts))
    return Html("<!doctype html>\n" + tag("html", head, body, lang="en") + "\n")


def title(subject: Subject) -> str:
    """What the page is called."""
    if subject.is_bench:
        return f"Benchmark {subject.folder.resolve().name}"
    if len(subject.trainings) == 1:
        [training] = subject.trainings
        return f"{training.run.recipe}, {training.system}, {count(training.run.world_size, 'worker')}"
    return f"{', '.join(subject.recipes)}: {len(subject.trainings)} runs compared"


def notices(subject: Subject) -> list[str]:
    """What a reader must know before believing a number."""
    said = []
    for training in subject.trainings:
        run = training.run
        if run.state == "failed":
            said.append(f"{training.label} failed; its numbers end with step {run.steps}.")
        elif run.state == "unfinished":
            at = as_date(run.last_time)
            ended = "if it no longer runs, it was ended from outside"
            said.append(f"{training.label} has not finished; its last event is of {at} ({ended}).")
        told = run.summary.instruments if run.summary is not None else {}
        sparse_s, dense_s = told.get("sparse_s", 0.0), told.get("dense_s", 0.0)
        if sparse_s > dense_s > 0:  # as top-k strategies tell: both are 0 until they know
            said.append(
                f"{training.label} did not pay there: selecting and sending took {as_seconds(sparse_s)} of "
                "every step, sending everything with all-reduce would have taken about "
                f"{as_seconds(dense_s)}."
            )
        if run.summary is not None and run.summary.caution:
            said.append(f"{training.label}: {run.summary.caution}.")
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
    """A part of the page with its heading."""
    return tag("section", tag("h2", heading), *content, id=name)


def _plots(plots: Sequence[tuple[Plot, Html]]) -> Html:
    """Plots of the same kind side by side under one heading; after them, or alone, those of which one is."""
    kinds: dict[str, list[tuple[Plot, Html]]] = {}
    for plot, svg in plots:
        kinds.setdefault(plot.title, []).append((plot, svg))
    parts = []
    for heading, same in kinds.items():
        if len(same) > 1:
            figures = [tag("figure", tag("h4", plot.about), svg) for plot, svg in same]
            parts += [tag("h3", heading), tag("p", same[0][0].caption, class_="caption")]
            parts.append(tag("div", *figures, class_="plots"))
    alone = [
        tag("figure", tag("h3", plot.title), tag("h4", plot.about), svg, tag("figcaption", plot.caption))
        for same in kinds.values()
        if len(same) == 1
        for plot, svg in same
    ]
    parts += [tag("div", *alone, class_="plots")] if alone else []
    return section("Plots", *parts, name="plots") if parts else Html()


def _tiles(numbers: Sequence[tuple[str, str, str]]) -> Html:
    return tag(
        "div",
        *(
            tag("div", tag("span", name), tag("strong", value), tag("small", words), class_="tile")
            for name, value, words in numbers
        ),
        class_="tiles",
    )


def _tables(subject: Subject) -> list[Html]:
    parts = []
    if subject.is_bench:
        words = "Per step and worker. Median over turns, with quartiles in brackets."
        tables = step_tables(subject.timings, headline(subject.timings))
        parts.append(section("Step time", tag("p", words, class_="caption"), *tables, name="steps"))
    if len(subject.trainings) > 1 or (subject.is_bench and subject.trainings):
        tables = [
            join([tag("h3", recipe), run_table(subject.of_recipe(recipe))]) for recipe in subject.recipes
        ]
        parts.append(section("Trainings", *tables, name="trainings"))
    return parts


def _workers(trainings: Sequence[NamedRun]) -> Html:
    if not trainings:
        return Html()
    if len(trainings) == 1:
        return section("Workers", worker_table(trainings[0].run), name="workers")
    folded = [tag("details", tag("summary", t.label), worker_table(t.run)) for t in trainings]
    return section("Workers", *folded, name="workers")


def _failures(trainings: Sequence[NamedRun]) -> Html:
    items = []
    for training in trainings:
        for event in training.run.failures:
            assert isinstance(event.record, Failed)
            failed = event.record
            who = f"{training.label}: worker {event.rank} on {failed.host}, {as_date(event.time)}"
            kind = "follows from another worker's failure" if failed.consequence else failed.error
            hint = [tag("p", f"hint: {failed.hint}")] if failed.hint else []
            items.append(tag("li", tag("strong", who), f" ({kind})", tag("pre", failed.message), *hint))
    return section("Failures", tag("ul", *items), name="failures") if items else Html()


def _raw_data(subject: Subject) -> Html:
    places = [str(training.run.folder / FOLDER) for training in subject.trainings]
    places += [str(subject.folder / FOLDER)] if subject.is_bench else []
    parts = [
        tag("p", "One JSON record per line, one file per worker. The plots are beside this page, in plots/."),
        tag("ul", *(tag("li", tag("code", place)) for place in places)),
    ]
    for training in subject.trainings:
        kept = json.dumps(training.run.facts or dict(training.run.config), indent=2, default=str)
        parts.append(tag("details", tag("summary", f"configuration of {training.label}"), tag("pre", kept)))
    if subject.facts:
        kept = json.dumps(subject.facts, indent=2, default=str)
        parts.append(tag("details", tag("summary", "configuration of the benchmark"), tag("pre", kept)))
    return section("Raw data", *parts, name="data")
