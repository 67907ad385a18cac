"""`thinwire lab`: a cluster with slow paths on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from thinwire.cli.output import note
from thinwire.errors import check
from thinwire.hosts.description import Description, describe
from thinwire.lab.calibrate import Calibration, calibrate
from thinwire.lab.job import Job
from thinwire.lab.nets import NET_VARIABLE, SCALE_VARIABLE, parse_net
from thinwire.lab.run import run

app = typer.Typer(help="A cluster with slow paths, tried out on this machine.", rich_markup_mode=None)

Command = Annotated[
    list[str],
    typer.Argument(metavar="COMMAND", help="After --: train.py ..., -m module ..., or any program."),
]
Hosts = Annotated[int, typer.Option(help="How many hosts, with one worker each.")]
Rate = Annotated[str, typer.Option(help="Bandwidth of each host: 100mbit, or 1gbit*6,100mbit*2.")]
Sites = Annotated[str | None, typer.Option(metavar="N+M", help="Hosts per site: 4+4.")]
Uplink = Annotated[str | None, typer.Option(metavar="RATE", help="Bandwidth of each site's uplink.")]


@app.command(name="run", context_settings={"allow_interspersed_args": False})
def run_command(
    command: Command,
    hosts: Hosts = 4,
    rate: Rate = "100mbit",
    sites: Sites = None,
    uplink: Uplink = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST=SPEED", help="A host that computes slower: 3=0.5; repeatable."),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:...", help="kill:host=3,step=20; also pause, slow, cut, heal, rejoin; repeatable."
        ),
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(metavar="NET", help="What `Emulated.of_this_lab()` is: resnet50, params=5e6,..."),
    ] = None,
    scale: Annotated[float, typer.Option(help="Shrinks the emulated net and all rates together.")] = 1.0,
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End the run after this long.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Let the others run on after one has failed.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the outcome as one JSON object at the end.")
    ] = False,
) -> None:
    """Run a command on every host, as torchrun would start it."""
    description = describe(
        hosts=hosts, rate=rate, sites=sites, uplink=uplink, slow=slow or [], faults=fault or []
    )
    check(scale == 1 or emulate is not None, "scale", "used with --emulate", scale)
    said = [f"{description.summary()}; latency is this machine's own"]
    environment = {}
    if emulate is not None:
        net = parse_net(emulate, scale=scale)
        description = description.scaled(scale)
        environment = {NET_VARIABLE: emulate, SCALE_VARIABLE: repr(scale)}
        said.append(f"compute is emulated: {net.name}, {net.num_params:,} parameters")
    job = Job(
        description=description,
        command=tuple(command),
        environment=environment,
        time_limit_s=time_limit,
        keep_going=keep_going,
    )
    for words in said:
        note(f"lab: {words}")
    outcome = run(job)
    for warning in outcome.warnings:
        note(f"warning: {warning}")
    if as_json:
        typer.echo(json.dumps(asdict(outcome)))
    raise typer.Exit(outcome.exit_code)


@app.command(name="check")
def check_command(
    hosts: Hosts = 4,
    rate: Rate = "100mbit",
    sites: Sites = None,
    uplink: Uplink = None,
    megabytes: Annotated[float, typer.Option(help="Size of each transfer.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the readings as one JSON object.")] = False,
) -> None:
    """Measure transfers in a lab and compare them with arithmetic."""
    description = describe(hosts=hosts, rate=rate, sites=sites, uplink=uplink)
    found = calibrate(description, megabytes=megabytes)
    typer.echo(json.dumps(asdict(found)) if as_json else readings(description, found, megabytes))
    for warning in found.warnings:
        note(f"warning: {warning}")
    raise typer.Exit(0 if found.good else 1)


def readings(description: Description, found: Calibration, megabytes: float) -> str:
    """The readings for people."""
    lines = [f"{description.summary()}, {megabytes:g} MB each"]
    lines.append(f"{'':20}{'arithmetic':>12}{'measured':>12}{'ratio':>8}")
    for reading in found.readings:
        verdict = "" if reading.close else "  not what it should be"
        times = f"{reading.expected_s * 1e3:>9.0f} ms{reading.measured_s * 1e3:>9.0f} ms"
        lines.append(f"{reading.operation:20}{times}{reading.ratio:>8.2f}{verdict}")
    lines.append(f"interfaces counted {found.counted_share:.3f} of the bytes handed to them")
    lines.append(f"processors {found.busy_share:.0%} busy")
    return "\n".join(lines)
