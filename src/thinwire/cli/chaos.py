"""`thinwire chaos`: a user's own elastic script under random faults."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from thinwire.chaos.draw import IN_LAB, KINDS, Schedule
from thinwire.chaos.lab import run_in_lab
from thinwire.chaos.local import LocalRun, python_command
from thinwire.chaos.outcome import Outcome
from thinwire.chaos.report import Report, Told, judge
from thinwire.cli import options
from thinwire.cli.output import columns, note, results_folder
from thinwire.errors import check
from thinwire.hosts.description import describe, parse_fault
from thinwire.hosts.quantities import parse_duration
from thinwire.units import count as counted


def chaos(
    script: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]", help="train.py ..., or -m module ... after --.")
    ],
    workers: Annotated[int, typer.Option(help="Processes to start.")] = 4,
    num_faults: Annotated[int, typer.Option("--faults", help="Faults to draw.")] = 8,
    kinds: Annotated[
        str, typer.Option(metavar="KIND,...", help=f"To draw from: {', '.join(KINDS)} (the last two: --lab).")
    ] = "kill,rejoin,freeze,slow",
    fault: options.Fault = None,
    seed: Annotated[int, typer.Option(help="Seed of the faults.")] = 0,
    begin: Annotated[str, options.time("From the first step to the first fault.")] = "5s",
    every: Annotated[str, options.time("Mean time between two faults.")] = "5s",
    silence: Annotated[
        str, options.time("silence_s of the script's attach: freezes and cuts are drawn around it.")
    ] = "10s",
    lab: Annotated[
        bool, typer.Option("--lab", help="A host for each worker, whose path can be cut.")
    ] = False,
    rate: options.Rate = "1gbit",
    sites: options.Sites = None,
    uplink: options.Uplink = None,
    time_limit: Annotated[str, options.time("Whoever trains longer hangs.")] = "10min",
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Run an elastic script under faults, and tell what was noticed, when, and what was lost.

    Exit status 0: nobody hung or failed, every sample was seen once in each epoch, all ended with one model.
    """
    silence_s = parse_duration(silence, field="silence")
    chosen = _kinds(kinds, lab)
    if fault:
        faults = [parse_fault(text) for text in fault]
    else:
        faults = Schedule(
            workers=workers,
            count=num_faults,
            kinds=chosen,
            seed=seed,
            begin_s=parse_duration(begin, field="begin"),
            every_s=parse_duration(every, field="every"),
            silence_s=silence_s,
            sites=1 if sites is None else len(sites.split("+")),
        ).draw()
    limit_s = parse_duration(time_limit, field="time limit")
    folder = results_folder(out, f"chaos-{Path(script[0]).stem}")
    for each in faults:
        note(f"planned: {each}")
    if lab:
        uplink = uplink or (rate if sites else None)
        texts = [str(each) for each in faults]
        description = describe(hosts=workers, rate=rate, sites=sites, uplink=uplink, faults=texts)
        outcome = run_in_lab(script, description, folder, time_limit_s=limit_s)
    else:
        command = python_command(script[0], script[1:])
        outcome = LocalRun(command, workers, folder, faults, time_limit_s=limit_s).run()
    _tell(outcome, folder, as_json)


def _kinds(text: str, lab: bool) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    possible = lab or not set(kinds) & set(IN_LAB)
    check(possible, "kinds", f"without {' and '.join(IN_LAB)} outside --lab", text)
    return kinds


def _tell(outcome: Outcome, folder: Path, as_json: bool) -> NoReturn:
    """Write the report, print it, and end with its exit status."""
    report = judge(outcome)
    (folder / "report.json").write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    for missed in outcome.not_reached:
        note(f"warning: {missed}: the run was over before")
    typer.echo(json.dumps(report.as_json()) if as_json else text_of(report, folder))
    sys.stdout.flush()
    raise typer.Exit(1 if report.wrong else 0)


def text_of(report: Report, folder: Path) -> str:
    """The report as people read it."""
    rows = [["at", "fault", "noticed by", "after", "as", "all went on after", "with"]]
    rows += [_row(told) for told in report.faults]
    samples = report.samples
    lines = [
        columns(rows, left=(1, 4)),
        f"{report.steps} steps in {report.seconds:.0f} s, {counted(report.generations, 'generation')}; "
        f"{counted(report.models, 'model')} at the end",
        f"samples: {samples.samples} in {counted(samples.epochs, 'epoch')}, {samples.doubled} more than "
        f"once, {samples.missing} never, {samples.again} done again for lost workers",
        *(f"wrong: {each}" for each in report.wrong),
        f"{'FAIL' if report.wrong else 'pass'}; output and journals of all workers in {folder}",
    ]
    return "\n".join(lines)


def _row(told: Told) -> list[str]:
    return [
        f"{told.at_s:.1f} s",
        _short(told.fault),
        str(told.noticed_by) if told.noticed_by else "",
        "" if told.noticed_s is None else f"{told.noticed_s:.2f} s",
        told.how,
        "" if told.resumed_s is None else f"{told.resumed_s:.2f} s",
        "" if told.generation is None or not told.workers else counted(told.workers, "worker"),
    ]


def _short(text: str) -> str:
    """A fault without the time it was planned for, which is in the column before."""
    kind, _, rest = text.partition(":")
    words = [word for word in rest.split(",") if not word.startswith(("after=", "step="))]
    return f"{kind} {' '.join(words)}"
