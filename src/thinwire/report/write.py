"""Writes the page and its plots into the folder they are about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import DataError
from thinwire.report import drawing
from thinwire.report.drawing import Plot
from thinwire.report.looks import Look, looks
from thinwire.report.page import notices, page
from thinwire.report.run_plots import run_plots, worker_bars
from thinwire.report.step_plots import step_plots
from thinwire.report.subject import Subject, read_subject
from thinwire.report.verdict import verdict
from thinwire.units import count

PAGE = "report.html"
PLOTS = "plots"


@dataclass(frozen=True, slots=True)
class Written:
    """What was made, and what it says."""

    page: Path
    plots: tuple[Path, ...]
    verdict: str
    notices: tuple[str, ...]


def write_report(folder: Path, progress: Callable[[str], object] = lambda words: None) -> Written:
    """Make `report.html` and `plots/` of whatever the folder holds; `progress` hears what is being done."""
    drawing.check_installed()
    subject = read_subject(folder)
    try:
        (folder / PLOTS).mkdir(exist_ok=True)
        with drawing.style():
            plots = _plots(subject)
            progress(f"drawing {count(len(plots), 'plot')} into {folder / PLOTS}")
            drawn = [(plot, drawing.save(plot, folder / PLOTS)) for plot in plots]
        (folder / PAGE).write_text(page(subject, drawn), encoding="utf-8")
    except OSError as error:
        raise DataError(f"the report cannot be written into {folder}: {error.strerror}") from error
    made = [folder / PLOTS / f"{plot.name}.{ending}" for plot, _ in drawn for ending in ("svg", "png")]
    return Written(folder / PAGE, tuple(made), verdict(subject), tuple(notices(subject)))


def _plots(subject: Subject) -> list[Plot]:
    systems = _looks(subject)
    steps = step_plots(subject.timings, systems)
    curves = [plot for recipe in subject.recipes for plot in run_plots(subject.of_recipe(recipe), systems)]
    plots = [*steps, *curves] if subject.is_bench else [*curves, *steps]
    if len(subject.trainings) == 1 and not subject.is_bench:
        plots += worker_bars(subject.trainings[0], systems)
    taken: Counter[str] = Counter()
    for plot in plots:  # names that only differ in what a file name cannot hold
        taken[plot.name] += 1
        plot.name += f"-{taken[plot.name]}" if taken[plot.name] > 1 else ""
    return plots


def _looks(subject: Subject) -> dict[str, Look]:
    """One look per system, over all plots of the page."""
    named = [(timing.system, timing.family) for timing in subject.timings]
    return looks([*named, *((training.system, training.family) for training in subject.trainings)])
