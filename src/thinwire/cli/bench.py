"""`thinwire bench`: measures our strategies and other systems side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from thinwire.bench.config import QUICK, RUNS, STANDARD, BenchConfig
from thinwire.bench.plan import cells
from thinwire.bench.run import BenchSetup, measure, prepare, write_results
from thinwire.bench.tables import Table
from thinwire.cli import options
from thinwire.cli.output import note, optional_page, results_folder
from thinwire.cli.show import report
from thinwire.errors import check
from thinwire.events import Event, StepTimed, Summary
from thinwire.hosts.quantities import format_rate, parse_counts, parse_duration, parse_rates
from thinwire.timings import GridCell
from thinwire.units import as_duration, as_metric, count

WIDEST = 140


def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="A small grid: under 5 minutes on two cores.")
    ] = False,
    workers: Annotated[
        str | None, typer.Option(metavar="N,N", help="Numbers of workers (2..16; with --quick 4).")
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE,RATE", help="Bandwidths (50mbit,200mbit,1gbit; with --quick 200mbit)."),
    ] = None,
    net: Annotated[list[str] | None, typer.Option(metavar="NET", help=f"{options.NET}; repeatable.")] = None,
    systems: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Only these: ddp,all-reduce:overlap=none; silent is added."),
    ] = None,
    rivals: Annotated[
        str | None,
        typer.Option(metavar="MODULE", help="Module of the rivals; by default this repository's, if here."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with MNIST and CIFAR-10, for time to accuracy.")
    ] = None,
    turns: Annotated[int | None, typer.Option(help="Blocks per system and cell, at most (3).")] = None,
    time_limit: Annotated[
        str | None, options.time("For the step times (45min; with --quick 100s); one turn at least.")
    ] = None,
    scale: options.Scale = 1.0,
    out: options.Out = None,
) -> None:
    """Measure step time and time to accuracy, against the ceiling and against rivals."""
    usual = QUICK if quick else STANDARD
    folder = None if data is None else str(data.absolute())
    config = replace(
        usual,
        workers=usual.workers if workers is None else tuple(parse_counts(workers)),
        rates_bits_per_s=usual.rates_bits_per_s if rate is None else tuple(parse_rates(rate)),
        nets=tuple(net or usual.nets),
        rivals=rivals,
        scale=scale,
        turns=usual.turns if turns is None else turns,
        minutes=usual.minutes if time_limit is None else parse_duration(time_limit, field="time limit") / 60,
        studies=tuple(replace(study, data=folder) for study in usual.studies),
    )
    names = None if systems is None else [name.strip() for name in systems.split(",") if name.strip()]
    hint = "leave it out to measure all, or see `thinwire strategies`"
    check(names is None or len(names) > 0, "systems", "at least one name", systems, hint=hint)
    carry_out(config, names, out)


def carry_out(
    config: BenchConfig, systems: list[str] | None, out: Path | None, *, prints: bool = True
) -> Path:
    """Run the benchmark, print its tables if wanted, and make the page; gives the folder of the results."""
    setting = prepare(config, systems)
    folder = results_folder(out, "bench")
    _announce(folder, setting)
    progress = _Progress(setting)
    try:
        measure(folder, setting, progress.watch, progress.begin)
    except KeyboardInterrupt:
        note(f"interrupted; the results so far are in {folder}")
        raise
    finally:
        results = write_results(folder, setting)
    if prints:
        _print(results, setting)
    note(f"tables in {folder}: step_time.md, time_to_accuracy.md; raw events in events/ and {RUNS}/")
    with optional_page():
        report(folder)
    return folder


def _announce(folder: Path, setting: BenchSetup) -> None:
    config = setting.config
    rates = ", ".join(map(format_rate, config.rates_bits_per_s)) if setting.shaped else "loopback"
    nets = f"{count(len(config.nets), 'net')}, compute emulated"
    grid = [f"workers {', '.join(map(str, config.workers))}", rates, nets]
    parts = grid if config.workers else []
    parts += [f"{study.recipe} trained by {study.workers} workers" for study in config.studies]
    note(f"{count(len(config.systems), 'system')}; {'; '.join(parts)}; results in {folder}")
    warnings = [f"no lab here, so rates do not apply: {setting.no_lab}"] if setting.no_lab else []
    warnings += [f"rivals {setting.no_rivals}"] if setting.no_rivals else []
    warnings += [f"{name} is {reason}" for name, reason in setting.absent.items()]
    warnings += [f"{recipe} is left out: {reason}" for recipe, reason in setting.no_data.items()]
    for warning in warnings:
        note(f"warning: {warning}")
    note(f"this takes at most about {as_duration(setting.outlook().left_s())}")


@dataclass(slots=True)
class _Progress:
    """Notes on stderr about the cell or training that is being measured, and the time left."""

    setting: BenchSetup
    until_s: float = 0.0

    def begin(self, what: str, left_s: float) -> None:
        self.until_s = time.monotonic() + left_s
        note(f"{what}; about {as_duration(left_s)} left")

    def watch(self, place: Path, event: Event) -> None:
        match event.record:
            case StepTimed() as timed:
                own = cells(self.setting.config, timed.workers, shaped=self.setting.shaped)
                cell = GridCell(timed.workers, timed.rate_bits_per_s, timed.net)
                place_of = f"cell {own.index(cell) + 1} of {len(own)}, turn {timed.turn + 1}"
                rate = "loopback" if timed.rate_bits_per_s is None else format_rate(timed.rate_bits_per_s)
                result = timed.unavailable or f"{timed.step_s:.3f} s"
                left = as_duration(max(self.until_s - time.monotonic(), 0))
                note(
                    f"  {place_of}: {timed.workers} workers, {rate}, {timed.system}: {result}  ({left} left)"
                )
            case Summary() as summary:
                value = "unknown" if summary.value is None else as_metric(summary.metric, summary.value)
                system = place.name.removeprefix(f"{summary.recipe}-")
                note(f"  {summary.recipe}, {system}: {summary.metric} {value} in {summary.train_s:.1f} s")


def _print(results: dict[str, list[Table]], setting: BenchSetup) -> None:
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDEST
    for title, tables in results.items():
        if not tables:
            continue
        console.print(f"\n[bold]{title}[/bold]")
        if setting.no_rivals is not None:
            console.print(f"rivals: {setting.no_rivals}")
        for table in tables:
            drawn = RichTable(title=table.title, title_justify="left", title_style="")
            drawn.box, drawn.pad_edge = box.SIMPLE_HEAD, False
            for i, column in enumerate(table.columns):
                drawn.add_column(column, justify="right" if i else "left", no_wrap=i == 0)
            for texts in table.rows:
                drawn.add_row(*texts)
            console.print(drawn, *(f"  {words}" for words in table.notes), sep="\n")
