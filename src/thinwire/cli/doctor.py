"""`thinwire doctor`: measures the hosts it runs on, and names what is slow or cannot be reached."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli import options
from thinwire.cli.output import columns, note
from thinwire.units import as_bytes, as_rate, as_seconds

if TYPE_CHECKING:
    from thinwire.planner.doctor import Diagnosis


def doctor(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Cluster file to write, for `thinwire plan --cluster`.")
    ] = Path("cluster.json"),
    as_json: options.AsJson = False,
) -> None:
    """Measure the hosts of a job: reachability, latency, bandwidth, speed; one worker on every host.

    Start it as you would start the training: `torchrun ... -m thinwire doctor`, or in the lab:
    `thinwire lab run --hosts 4 -- -m thinwire doctor`.
    """
    from thinwire.planner.doctor import check_writable, examine  # which imports torch

    first = os.environ.get("RANK", "0") == "0"
    if first:
        check_writable(out)
    found = examine(told=note if first else lambda words: None)
    if first:
        found.cluster.save(out, found.found())
        typer.echo(json.dumps(found.found(), indent=1) if as_json else text(found))
        note(f"written to {out}: thinwire plan --cluster {out} ...")


def text(found: Diagnosis) -> str:
    """A table of hosts, all at once, and the findings."""
    head = "host|interface|address|pairs|latency|steps/s|copies|selects|torch|python"
    rows = [head.split("|")]
    for host, speed in zip(found.hosts, found.speeds, strict=True):
        paths = [path for path in found.paths if host.rank in path.ranks]
        rates = as_rate(float(f"{median(path.bit_per_s for path in paths):.3g}"))
        latency = as_seconds(median(path.latency_s for path in paths))
        speeds = [f"{speed.steps_per_s:.0f}", f"{as_bytes(speed.copy_bytes_per_s)}/s"]
        selects = f"{speed.select_numbers_per_s / 1e6:.0f} M/s"
        where = [host.name, host.interface, host.address]
        rows.append([*where, rates, latency, *speeds, selects, host.torch, host.python])
    hop_s = found.cluster.hop_s or found.cluster.latency_s
    at_once = (
        f"all at once: {as_rate(float(f'{found.busy_bit_per_s:.3g}'))} while computing, "
        f"{as_rate(float(f'{found.idle_bit_per_s:.3g}'))} idle; a message takes "
        f"{as_seconds(found.cluster.latency_s)}, a hop of a collective {as_seconds(hop_s)}"
    )
    said = [f"- {words}" for words in found.findings] or ["- nothing is slow or wrong"]
    return "\n".join([columns(rows, left=(0, 1, 2)), "", at_once, "", *said])
