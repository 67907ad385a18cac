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
from thinwire.errors import SettingError, check
from thinwire.files import check_writable
from thinwire.units import as_bytes, as_rate, as_seconds

if TYPE_CHECKING:
    from thinwire.planner.doctor import Diagnosis

MOST_HOSTS = 1_024
PORT = 29_500
"""As torchrun's."""


def doctor(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Cluster file to write, for `thinwire plan --cluster`.")
    ] = Path("cluster.json"),
    hosts: Annotated[
        int | None, typer.Option(help="Hosts of the job, to start it without torchrun on each of them.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Of this host, from 0 on; only with --hosts.")] = None,
    first: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS[:PORT]", help="Of the host with rank 0; only with --hosts."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure the hosts of a job: reachability, latency, bandwidth, speed; one worker on every host.

    Start it as you would start the training: `torchrun ... -m thinwire doctor`, or in the lab:
    `thinwire lab run --hosts 4 -- -m thinwire doctor`. torchrun waits for a host that is missing; started
    on every host with --hosts, --rank and --first, the doctor names it within 20 seconds.
    """
    started = {} if hosts is None and rank is None and first is None else place(hosts, rank, first)
    os.environ.update(started)
    # torch prints a C++ stack for every try to connect: what is wrong is said in words below
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from thinwire.planner.doctor import examine  # which imports torch

    speaks = os.environ.get("RANK", "0") == "0"
    if speaks:
        check_writable(out)
    found = examine(told=note if speaks else lambda words: None)
    if speaks:
        found.cluster.save(out, found.found())
        typer.echo(json.dumps(found.found(), indent=1) if as_json else text(found))
        note(f"written to {out}: thinwire plan --cluster {out} ...")


def place(hosts: int | None, rank: int | None, first: str | None) -> dict[str, str]:
    """The environment that torchrun would set on this host.

    >>> place(4, 1, "10.0.0.1")["MASTER_ADDR"]
    '10.0.0.1'
    """
    if hosts is None or rank is None or first is None:
        raise SettingError(
            "--hosts, --rank and --first go together",
            hint="on every host: thinwire doctor --hosts 4 --rank 0 --first 10.0.0.1",
        )
    check(2 <= hosts <= MOST_HOSTS, "hosts", f"2 to {MOST_HOSTS:,}", hosts)
    check(0 <= rank < hosts, "rank", f"0 to {hosts - 1}", rank)
    address, _, port = first.partition(":")
    valid = not port or (port.isdecimal() and 0 < int(port) < 1 << 16)
    check(bool(address) and valid, "first", "an address, or address:port", first)
    world = {"RANK": str(rank), "WORLD_SIZE": str(hosts), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**world, "MASTER_ADDR": address, "MASTER_PORT": port or str(PORT)}


def text(found: Diagnosis) -> str:
    """A table of hosts (clocks against that of the first), all at once, and the findings."""
    head = "host|interface|address|pairs|latency|clock|steps/s|copies|selects|torch|python"
    rows = [head.split("|")]
    skews = {0: 0.0} | {path.ranks[1]: path.skew_s for path in found.paths if path.ranks[0] == 0}
    for host, speed in zip(found.hosts, found.speeds, strict=True):
        paths = [path for path in found.paths if host.rank in path.ranks]
        rates = as_rate(float(f"{median(path.bit_per_s for path in paths):.3g}"))
        latency = as_seconds(median(path.latency_s for path in paths))
        speeds = [f"{speed.steps_per_s:.0f}", f"{as_bytes(speed.copy_bytes_per_s)}/s"]
        selects = f"{speed.select_numbers_per_s / 1e6:.0f} M/s"
        where = [host.name, host.interface, host.address]
        clock = f"{'-' if skews[host.rank] < 0 else '+'}{as_seconds(abs(skews[host.rank]))}"
        rows.append([*where, rates, latency, clock, *speeds, selects, host.torch, host.python])
    hop_s = found.cluster.hop_s or found.cluster.latency_s
    at_once = (
        f"all at once: {as_rate(float(f'{found.busy_bit_per_s:.3g}'))} while computing, "
        f"{as_rate(float(f'{found.idle_bit_per_s:.3g}'))} idle; a message takes "
        f"{as_seconds(found.cluster.latency_s)}, a hop of a collective {as_seconds(hop_s)}"
    )
    taken_ns = 1e9 * found.cluster.processor_s_per_byte
    on_processor = f"a byte that travels takes {taken_ns:.1f} ns from computing on the processor"
    said = [f"- {words}" for words in found.findings] or ["- nothing is slow or wrong"]
    return "\n".join([columns(rows, left=(0, 1, 2)), "", at_once, on_processor, "", *said])
