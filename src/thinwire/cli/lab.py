"""`thinwire lab`: a cluster with slow paths on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from thinwire.cli import options
from thinwire.cli.output import columns, note
from thinwire.errors import check
from thinwire.hosts.description import Description, describe
from thinwire.hosts.machine import Machine
from thinwire.hosts.quantities import parse_duration
from thinwire.lab.calibrate import Calibration, calibrate
from thinwire.lab.nets import NET_VARIABLE, SCALE_VARIABLE, parse_net
from thinwire.lab.run import Job, run

app = typer.Typer(help="A cluster with slow paths, tried out on this machine.", rich_markup_mode=None)

Hosts = Annotated[int, typer.Option(help="Number of hosts, with one worker each.")]


@app.command(name="run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="After --: train.py ..., -m module ..., or any program."),
    ],
    hosts: Hosts = 4,
    rate: options.Rate = "100mbit",
    sites: options.Sites = None,
    uplink: options.Uplink = None,
    slow: options.Slow = None,
    fault: options.Fault = None,
    emulate: Annotated[
        str | None,
        typer.Option(metavar="NET", help=f"Net of `EmulatedModel.from_environment()`: {options.NET}."),
    ] = None,
    scale: options.Scale = 1.0,
    time_limit: Annotated[str | None, options.time("End the run after this long: 10min.")] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Let the others run on after one has failed.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run a command on every host, started as torchrun would start it."""
    description = describe(
        hosts=hosts, rate=rate, sites=sites, uplink=uplink, slow=slow or [], faults=fault or []
    )
    check(scale == 1 or emulate is not None, "scale", "used with --emulate", scale)
    about, environment = [f"{description.summary()}; latency is this machine's own"], {}
    if emulate is not None:
        net = parse_net(emulate, scale=scale)
        num_bytes = 2 * 4 * net.num_params * hosts  # parameters and gradients
        Machine.this().check_memory(num_bytes, "emulate", emulate, hint="fewer hosts, or --scale 0.1")
        description = description.scaled(scale)
        environment = {NET_VARIABLE: emulate, SCALE_VARIABLE: repr(scale)}
        about.append(f"compute is emulated: {net.name}, {net.num_params:,} parameters")
    job = Job(
        description=description,
        command=tuple(command),
        environment=environment,
        time_limit_s=None if time_limit is None else parse_duration(time_limit, field="time limit"),
        keep_going=keep_going,
    )
    for line in about:
        note(f"lab: {line}")
    outcome = run(job)
    for warning in outcome.warnings:
        note(f"warning: {warning}")
    if as_json:
        typer.echo(json.dumps(asdict(outcome)))
    raise typer.Exit(outcome.exit_code)


@app.command(name="check")
def check_command(
    hosts: Hosts = 4,
    rate: options.Rate = "100mbit",
    sites: options.Sites = None,
    uplink: options.Uplink = None,
    megabytes: Annotated[float, typer.Option(help="Size of each transfer.")] = 10.0,
    as_json: options.AsJson = False,
) -> None:
    """Measure transfers in a lab and compare them with arithmetic."""
    description = describe(hosts=hosts, rate=rate, sites=sites, uplink=uplink)
    found = calibrate(description, megabytes=megabytes)
    typer.echo(json.dumps(asdict(found)) if as_json else readings(description, found, megabytes))
    for warning in found.warnings:
        note(f"warning: {warning}")
    raise typer.Exit(0 if found.good else 1)


def readings(description: Description, found: Calibration, megabytes: float) -> str:
    """The readings as a table for people."""
    rows = [["", "arithmetic", "measured", "ratio"]]
    for reading in found.readings:
        times = [f"{seconds * 1e3:.0f} ms" for seconds in (reading.expected_s, reading.measured_s)]
        rows.append([reading.operation, *times, f"{reading.ratio:.2f}" + ("" if reading.close else " (off)")])
    head = f"{description.summary()}, {megabytes:g} MB each"
    counted = f"interfaces counted {found.counted_share:.3f} of the bytes handed to them"
    return "\n".join([head, columns(rows, left=(0,)), counted, f"processors {found.busy_share:.0%} busy"])
