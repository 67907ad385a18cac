"""`thinwire simulate`: many workers in one process; real training, virtual time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import options
from thinwire.cli.output import columns, note, optional_page, results_folder, unused
from thinwire.errors import check
from thinwire.events import Event, Progress, plain
from thinwire.hosts.description import Description, describe
from thinwire.hosts.quantities import parse_counts, parse_duration
from thinwire.lab.nets import Net, parse_net
from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig, resolve, write_config
from thinwire.report.page import write_report
from thinwire.strategies import registry as strategies
from thinwire.units import as_bytes, as_metric, as_percent

if TYPE_CHECKING:
    from thinwire.recipes.virtual import VirtualCluster

STRATEGIES = ["silent", "all-reduce"]
NOTE_EVERY_S = 5.0
MOST_STEPS = 1_000_000
LONGEST_NAME = 100
"""Characters of a strategy in the name of its folder: a file system takes 255."""


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
    apoptosis: options.Apoptosis = "",
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
    check(steps is None or steps <= MOST_STEPS, "steps", f"at most {MOST_STEPS:,}", steps)
    times = {"latency_s": parse_duration(latency, field="latency")}
    times["uplink_latency_s"] = parse_duration(uplink_latency, field="uplink latency")
    if emulate is not None:
        check(compute is None, "compute", "left out with --emulate, which states it", compute)
        rows = _play_sizes(parse_net(emulate), hosts, strategy, times, 5 if steps is None else steps, jitter)
        typer.echo(json.dumps(rows) if as_json else _sizes_table(rows))
        return
    from thinwire.recipes.virtual import VirtualCluster  # which imports torch

    times["recovery_s"] = parse_duration(recovery, field="recovery")
    compute_s = None if compute is None else parse_duration(compute, field="compute")
    cluster: dict[str, Any] = {"compute_s": compute_s, "jitter": jitter, "max_steps": steps, **times}
    choices: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size, "seed": seed, "data": data}
    choices |= {"shuffle": shuffle, "apoptosis": apoptosis, "device": device}
    planned = []  # all settings are checked before the first run
    for description, text in product(hosts, dict.fromkeys(strategy)):
        config = resolve(recipe, text, workers=len(description.hosts), **choices)
        planned.append((text, config, VirtualCluster(description=description, **cluster)))
    folder = results_folder(out, f"simulate-{recipe}")
    results = [_play(folder, *each) for each in planned]
    typer.echo(json.dumps(results) if as_json else _results_table(results))
    note(f"results in {folder}")
    with optional_page():
        note(f"page with plots: {write_report(folder).page}")


def _play(folder: Path, text: str, config: RunConfig, cluster: VirtualCluster) -> dict[str, Any]:
    from thinwire.recipes.virtual import simulate

    name = text.replace(":", "-").replace("/", "-")[:LONGEST_NAME]
    own = unused(folder / f"{name}-{config.workers}")
    own.mkdir()
    write_config(own, cluster.config(config))
    note(f"{text}, {config.workers} workers ...")
    began_s = noted_s = time.monotonic()

    def watch(event: Event) -> None:
        nonlocal noted_s
        progress, now_s = event.record, time.monotonic()
        if isinstance(progress, Progress) and event.rank == 0 and now_s - noted_s > NOTE_EVERY_S:
            noted_s = now_s
            loss = "" if progress.loss is None else f", loss {progress.loss:.4g}"
            steps = f"step {progress.step} of {progress.num_steps}{loss}"
            note(f"  {steps}, {progress.train_s:.4g} virtual s, {now_s - began_s:.0f} s here")

    simulated = simulate(registry.get(config.recipe), config, cluster, own, watch)
    happened = {words.partition("s: ")[2] for words in simulated.happened}
    faults = [str(fault) for fault in cluster.description.faults]
    missed = [f"{fault}: the run ended before that" for fault in faults if fault not in happened]
    # of the epochs, those in which samples were repeated, or else the last
    accounts = [words for words in simulated.accounts if "again" in words] or simulated.accounts[-1:]
    for words in (*simulated.happened, *missed, *accounts):
        note(f"  {words}")
    facts = {**plain(simulated.summary), **asdict(simulated), "asked": text, "run": str(own)}
    facts.pop("summary")
    return {**facts, "wall_s": time.monotonic() - began_s}


def _results_table(results: list[dict[str, Any]]) -> str:
    metric = results[0]["metric"]
    rows = [f"workers|strategy|{metric}|loss|virtual s|s/step|exposed|sent/step|apart|here".split("|")]
    for result in results:
        row = [str(result["workers"]), result["asked"]]
        row += ["-" if result["value"] is None else as_metric(metric, result["value"])]
        row += ["-" if result["loss"] is None else f"{result['loss']:.4g}"]
        row += [f"{result['train_s']:.4g}", f"{result['train_s'] / result['steps']:.4g}"]
        row += [as_percent(result["exposed_share"]), as_bytes(result["sent_bytes_per_step"])]
        rows.append([*row, f"{result['distance']:.2g}", f"{result['wall_s']:.0f} s"])
    return columns(rows, left=(1,))


def _play_sizes(
    net: Net,
    hosts: Sequence[Description],
    texts: Sequence[str],
    latencies: dict[str, float],
    steps: int,
    jitter: float,
) -> list[dict[str, Any]]:
    """Step times of `net` with every strategy on all `hosts`, from sizes alone."""
    from thinwire.simulate.clock import ComputeModel
    from thinwire.simulate.network import Network
    from thinwire.simulate.sizes import step_times

    built = {text: strategies.from_text(text) for text in texts}
    shapes = [shape for layer in net.layers for shape in layer.shapes]
    layer_shares = zip(net.layers, net.shares(), strict=True)
    shares = [share / len(layer.shapes) for layer, share in layer_shares for _ in layer.shapes]
    model = ComputeModel(forward_s=net.forward_s, backward_s=net.backward_s, shares=tuple(shares))
    rows = []
    for description, (text, strategy) in product(hosts, built.items()):
        began_s, workers = time.monotonic(), len(description.hosts)
        note(f"{text}, {workers} workers, sizes alone ...")
        network = Network(
            description, latency_s=latencies["latency_s"], uplink_latency_s=latencies["uplink_latency_s"]
        )
        paced = step_times(shapes, network, strategy, model, steps=steps, jitter=jitter)
        row = {"workers": workers, "strategy": text, "net": net.name, **asdict(paced)}
        rows.append({**row, "wall_s": time.monotonic() - began_s})
    return rows


def _sizes_table(rows: list[dict[str, Any]]) -> str:
    lines = [["workers", "strategy", "s/step", "exposed s", "sent/step", "messages", "here"]]
    for row in rows:
        times = [f"{row['step_s']:.4g}", f"{row['exposed_s']:.4g}"]
        sent = [as_bytes(row["sent_bytes"]), f"{row['messages']:.4g}"]
        lines.append([str(row["workers"]), row["strategy"], *times, *sent, f"{row['wall_s']:.1f} s"])
    return columns(lines, left=(1,))
