"""`thinwire bench`: our strategies and other systems, measured side by side."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from thinwire.bench.config import QUICK, RUNS, STANDARD, BenchConfig
from thinwire.bench.plan import Cell, cells
from thinwire.bench.results import Results, write_results
from thinwire.bench.run import Setting, measure, prepare
from thinwire.bench.table import Table
from thinwire.cli.folders import results_folder
from thinwire.cli.output import note
from thinwire.cli.report import report
from thinwire.errors import MissingExtra, SettingError
from thinwire.events import Event, StepTimed, Summary
from thinwire.hosts.rates import format_rate, parse_rate
from thinwire.units import as_duration, as_metric, count

WIDEST = 140


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="A small grid: under 5 minutes on two cores.")
    ] = False,
    workers: Annotated[
        str | None, typer.Option(metavar="N,N", help="Numbers of workers (2,4,8,16; with --quick 4).")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE,RATE", help="Bandwidths (50mbit,200mbit,1gbit; with --quick 200mbit)."),
    ] = None,
    net: Annotated[
        list[str] | None,
        typer.Option(metavar="NET", help="resnet50, or params=5e6,layers=16,forward=0.1,...; repeatable."),
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Only these: ddp,all-reduce:overlap=none; silent is added."),
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option(metavar="MODULE", help="Where rivals come from; by default this repository's, if here."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with MNIST and CIFAR-10, for time to accuracy.")
    ] = None,
    turns: Annotated[int | None, typer.Option(help="Blocks per system and cell, at most (3).")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="For the step times, at least one turn (45; with --quick 1.7).")
    ] = None,
    scale: Annotated[float, typer.Option(help="Shrinks nets and rates together; seconds stay.")] = 1.0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for the results (below runs/).")
    ] = None,
) -> None:
    """Measure step time and time to accuracy, against the ceiling and against rivals."""
    usual = QUICK if quick else STANDARD
    config = replace(
        usual,
        workers=_numbers(workers) or usual.workers,
        rates_bits_per_s=tuple(parse_rate(text) for text in _words(rate)) or usual.rates_bits_per_s,
        nets=tuple(net or usual.nets),
        rivals=rivals,
        scale=scale,
        turns=usual.turns if turns is None else turns,
        minutes=usual.minutes if minutes is None else minutes,
        studies=tuple(
            replace(study, data=None if data is None else str(data.absolute())) for study in usual.studies
        ),
    )
    carry_out(config, _words(systems) or None, out)


def carry_out(config: BenchConfig, systems: list[str] | None, out: Path | None) -> None:
    """Measure, print both tables, and make the page."""
    setting = prepare(config, systems)
    folder = results_folder(out, "bench")
    _announce(folder, setting)
    progress = _Progress(setting)
    try:
        measure(folder, setting, progress.watch, progress.begin)
    except KeyboardInterrupt:
        note(f"interrupted; what was measured so far is in {folder}")
        raise
    finally:
        results = write_results(folder, setting)
    _print(results, setting)
    note(f"tables in {folder}: step_time.md, time_to_accuracy.md; raw events in events/ and {RUNS}/")
    try:
        report(folder)
    except MissingExtra as missing:
        note(f"no page was made: {missing.message} ({missing.hint})")


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _numbers(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise SettingError(f"workers must be whole numbers, got {text!r}", hint="--workers 2,4,8") from None


def _announce(folder: Path, setting: Setting) -> None:
    config = setting.config
    rates = ", ".join(map(format_rate, config.rates_bits_per_s)) if setting.shaped else "loopback"
    nets = f"{count(len(config.nets), 'net')}, compute emulated"
    grid = [f"workers {', '.join(map(str, config.workers))}", rates, nets]
    parts = grid if config.workers else []
    parts += [f"{study.recipe} trained by {study.workers} workers" for study in config.studies]
    note(f"{count(len(config.systems), 'system')}; {'; '.join(parts)}; results in {folder}")
    if setting.no_lab is not None:
        note(f"warning: no lab here, so rates do not apply: {setting.no_lab}")
    if setting.no_rivals is not None:
        note(f"warning: rivals {setting.no_rivals}")
    for name, reason in setting.absent.items():
        note(f"warning: {name} is {reason}")
    for recipe, reason in setting.no_data.items():
        note(f"warning: {recipe} is left out: {reason}")
    note(f"this takes at most about {as_duration(setting.outlook().left_s())}")


class _Progress:
    """Lines about what is measured: a cell of so many, a run of so many, and the time left."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._began = time.monotonic()
        self._left_s = 0.0

    def begin(self, what: str, left_s: float) -> None:
        """A new set of processes."""
        self._began, self._left_s = time.monotonic(), left_s
        note(f"{what}; about {as_duration(left_s)} left")

    def watch(self, place: Path, event: Event) -> None:
        """Say what came out."""
        match event.record:
            case StepTimed() as timed:
                own = cells(self._setting.config, timed.workers, shaped=self._setting.shaped)
                cell = Cell(timed.workers, timed.rate_bits_per_s, timed.net)
                place_of = f"cell {own.index(cell) + 1} of {len(own)}, turn {timed.turn + 1}"
                rate = "loopback" if timed.rate_bits_per_s is None else format_rate(timed.rate_bits_per_s)
                result = timed.unavailable or f"{timed.step_s:.3f} s"
                left_s = max(self._left_s - (time.monotonic() - self._began), 0)
                note(
                    f"  {place_of}: {timed.workers} workers, {rate}, {timed.system}: {result}"
                    f"  ({as_duration(left_s)} left)"
                )
            case Summary() as summary:
                value = "unknown" if summary.value is None else as_metric(summary.metric, summary.value)
                system = place.name.removeprefix(f"{summary.recipe}-")
                note(f"  {summary.recipe}, {system}: {summary.metric} {value} in {summary.train_s:.1f} s")
            case _:
                pass


def _print(results: Results, setting: Setting) -> None:
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDEST
    for title, tables in (("Step time", results.step_time), ("Time to accuracy", results.time_to_accuracy)):
        if not tables:
            continue
        console.print(f"\n[bold]{title}[/bold]")
        if setting.no_rivals is not None:
            console.print(f"rivals: {setting.no_rivals}")
        for table in tables:
            console.print(_drawn(table))
            for words in table.notes:
                console.print(f"  {words}")


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(
        title=table.title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for i, column in enumerate(table.columns):
        drawn.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
    for texts in table.rows:
        drawn.add_row(*texts)
    return drawn
