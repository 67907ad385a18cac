"""Writes a self-contained HTML page without scripts, and its plots, into the folder they are about."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from thinwire.errors import DataError
from thinwire.event_log import FOLDER
from thinwire.report import drawing
from thinwire.report.drawing import COLOURS, PNG_DPI, WIDTH_INCHES, Plot
from thinwire.report.findings import as_date, key_numbers, notices, title, verdict, what_was_run
from thinwire.report.plots import run_plots, step_plots, worker_bars
from thinwire.report.runs import Run
from thinwire.report.subject import Subject, read_subject
from thinwire.report.tables import Html, join, run_table, step_tables, tag, worker_table
from thinwire.timings import headline
from thinwire.units import count

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
            drawn = [(plot, save(plot, folder / PLOTS)) for plot in plots]
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
    texts = [(f"configuration of {name}", json.dumps(facts, indent=2, default=str)) for name, facts in kept]
    return [
        tag("p", "One JSON record per line, one file per worker. The plots are beside this page, in plots/."),
        tag("ul", *(tag("li", tag("code", str(folder / FOLDER))) for folder in folders)),
        *(tag("details", tag("summary", name), tag("pre", text)) for name, text in texts),
    ]


def save(plot: Plot, folder: Path) -> Html:
    """Write the plot as SVG and PNG, and return it as a part of a page, where the page says the title."""
    drawn = io.StringIO()
    plot.figure.savefig(drawn, format="svg", metadata={"Date": None})
    plot.figure.suptitle(f"{plot.title}\n{plot.about}", x=0.02, ha="left", fontsize=9)
    plot.figure.set_size_inches(WIDTH_INCHES, plot.figure.get_figheight() + 0.35)
    plot.figure.savefig(folder / f"{plot.name}.png", dpi=PNG_DPI)
    plot.figure.savefig(folder / f"{plot.name}.svg", metadata={"Date": None})
    return inline(drawn.getvalue(), plot)


def inline(svg: str, plot: Plot) -> Html:
    """An SVG file as a part of a page: no reference outward, ids that occur once, colours of the theme."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # to a screen reader the SVG is one image; without a size of its own it fits the width it is given
    head = f'<svg role="img" aria-label="{escape(plot.title)}, {escape(plot.about)}"'
    svg = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", lambda m: f"{head} {m[1]}>", svg, count=1)
    svg = svg.replace("xlink:href", "href")
    for name, words in plot.tips.items():
        svg = svg.replace(f'<g id="{name}">', f"<g><title>{escape(words)}</title>")
    reference = r"(url\(#|href=\"#)([^)\"]+)"
    used = {name for _, name in re.findall(reference, svg)}
    svg = re.sub(r" id=\"([^\"]+)\"", lambda m: f' id="{plot.name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(reference, rf"\1{plot.name}-\2", svg)
    svg = svg.replace("'DejaVu Sans'", "var(--font)")
    for variable, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{variable})")
    return Html(svg)
