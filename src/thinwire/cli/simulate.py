"""`thinwire simulate`: many workers in one process; real training, virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from thinwire.cli import options
from thinwire.cli.output import note
from thinwire.cli.show import optional_page
from thinwire.cli.simulated import play, play_sizes, results_table, sizes_table
from thinwire.errors import check
from thinwire.hosts.description import describe
from thinwire.hosts.quantities import parse_counts, parse_duration
from thinwire.lab.nets import parse_net
from thinwire.recipes import registry
from thinwire.report.page import write_report

STRATEGIES = ["silent", "all-reduce"]


def simulate(
    recipe: options.Recipe = registry.DEFAULT,
    workers: Annotated[str, typer.Option(metavar="N", help="64, or 4,16, or 4..64 (doubling).")] = "4",
    strategy: options.Strategies = STRATEGIES,
    rate: options.Rate = "1gbit",
    latency: Annotated[str, options.time("Latency between any two hosts.")] = "0.4ms",
    sites: options.Sites = None,
    uplink: options.Uplink = None,
    uplink_latency: Annotated[str, options.time("Added to the latency between sites.")] = "0s",
    compute: Annotated[
        str | None, options.time("Computing time of a step at full speed (measured here).")
    ] = None,
    slow: options.Slow = None,
    jitter: Annotated[float, typer.Option(help="Variation of the computing time: 0.1 is a tenth.")] = 0.0,
    fault: options.Fault = None,
    recovery: Annotated[str, options.time("Time until training goes on after a loss or a join.")] = "1s",
    epochs: options.Epochs = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many steps.")] = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    data: options.Data = None,
    shuffle: options.Shuffle = "dealt",
    device: options.Device = "auto",
    emulate: Annotated[
        str | None, typer.Option(metavar="NET", help=f"No training, sizes alone: {options.NET}.")
    ] = None,
    out: options.Out = None,
    as_json: options.AsJson = False,
) -> None:
    """Train with many workers on a virtual clock: the training is real, only time is not."""
    hosts = [
        describe(hosts=n, rate=rate, sites=sites, uplink=uplink, slow=slow or [], faults=fault or [])
        for n in parse_counts(workers)
    ]
    times = {
        "latency_s": parse_duration(latency, field="latency"),
        "uplink_latency_s": parse_duration(uplink_latency, field="uplink latency"),
    }
    if emulate is not None:
        check(compute is None, "compute", "left out with --emulate, which states it", compute)
        rows = play_sizes(parse_net(emulate), hosts, strategy, times, 5 if steps is None else steps, jitter)
        typer.echo(json.dumps(rows) if as_json else sizes_table(rows))
        return
    times["recovery_s"] = parse_duration(recovery, field="recovery")
    compute_s = None if compute is None else parse_duration(compute, field="compute")
    cluster = {"compute_s": compute_s, "jitter": jitter, "max_steps": steps, **times}
    choices: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "data": data}
    choices |= {"shuffle": shuffle, "device": device}
    results = play(recipe, hosts, strategy, choices, cluster, out)
    typer.echo(json.dumps(results) if as_json else results_table(results))
    folder = Path(results[0]["run"]).parent
    note(f"results in {folder}")
    with optional_page():
        note(f"page with plots: {write_report(folder).page}")
