"""`thinwire simulate`: many workers in one process; real training, virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.folders import results_folder
from thinwire.cli.output import note
from thinwire.cli.simulated import as_plain, play, play_sizes, sizes_table, table
from thinwire.errors import MissingExtra, SettingError, check
from thinwire.hosts.description import Description, describe
from thinwire.hosts.durations import parse_duration
from thinwire.lab.nets import parse_net
from thinwire.recipes import registry
from thinwire.recipes.config import Choices, resolve
from thinwire.report.write import write_report
from thinwire.strategies import registry as strategies

DEFAULT_STRATEGIES = ("silent", "all-reduce")
MOST_WORKERS = 100_000


def simulate(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="See `thinwire recipes`; or module:function of your own."),
    ] = registry.DEFAULT,
    workers: Annotated[
        str, typer.Option(metavar="N", help="How many: 64, or 4,16, or 4..64 (doubling).")
    ] = "4",
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE...]",
            help="How workers talk; repeatable (silent and all-reduce).",
        ),
    ] = None,
    rate: Annotated[str, typer.Option(help="Bandwidth of each host: 1gbit, or 1gbit*6,100mbit*2.")] = "1gbit",
    latency: Annotated[
        str, typer.Option(metavar="TIME", help="Of a message between any two hosts.")
    ] = "0.4ms",
    sites: Annotated[str | None, typer.Option(metavar="N+M", help="Hosts per site: 4+4.")] = None,
    uplink: Annotated[
        str | None, typer.Option(metavar="RATE", help="Bandwidth of each site's uplink.")
    ] = None,
    uplink_latency: Annotated[
        str, typer.Option(metavar="TIME", help="Added to the latency between sites.")
    ] = "0s",
    compute: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Of a step at full speed (what one replica takes here)."),
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST=SPEED", help="A host that computes slower: 3=0.5; repeatable."),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="How much computing varies from step to step: 0.1 is a tenth.")
    ] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:...", help="kill:host=3,step=20; also rejoin, slow, pause, cut; repeatable."
        ),
    ] = None,
    recovery: Annotated[
        str, typer.Option(metavar="TIME", help="Until training goes on after a loss or a join.")
    ] = "1s",
    epochs: Annotated[int | None, typer.Option(help="Times through the data (the recipe's).")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per worker and step (the recipe's).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, shuffling, dropout and jitter.")] = 0,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with the recipe's data.")] = None,
    shuffle: Annotated[
        str, typer.Option(help="dealt: all workers have all data; own: each keeps a part; ring: parts mix.")
    ] = "dealt",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; auto: cuda if there is one.")] = "auto",
    emulate: Annotated[
        str | None,
        typer.Option(metavar="NET", help="Sizes alone, no training: resnet50, or params=5e6,layers=16,..."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for the results (below runs/).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON array.")] = False,
) -> None:
    """Play a recipe with many workers on a virtual clock: the training is real, only time is not."""
    counts = parse_workers(workers)
    chosen = {text: strategies.parse(text) for text in strategy or DEFAULT_STRATEGIES}

    def hosts(count: int) -> Description:
        return describe(
            hosts=count, rate=rate, sites=sites, uplink=uplink, slow=slow or [], faults=fault or []
        )

    for count in counts:
        hosts(count)  # a mistake is told before anything is simulated
    latency_s = parse_duration(latency, field="latency")
    uplink_latency_s = parse_duration(uplink_latency, field="uplink latency")
    compute_s = None if compute is None else parse_duration(compute, field="compute")
    if emulate is not None:
        check(compute_s is None, "compute", "left out with --emulate, which states it", compute)
        net, num_steps = parse_net(emulate), 5 if steps is None else steps
        times = {"latency_s": latency_s, "uplink_latency_s": uplink_latency_s}
        rows = [play_sizes(net, hosts(n), text, times, num_steps, jitter) for n in counts for text in chosen]
        typer.echo(json.dumps(rows) if as_json else sizes_table(rows))
        return
    found = registry.get(recipe)
    configs = [
        (
            text,
            resolve(
                recipe,
                found,
                Choices(
                    strategy=name,
                    settings=settings,
                    workers=n,
                    epochs=epochs,
                    batch_size=batch_size,
                    seed=seed,
                    data=data,
                    device=device,
                    shuffle=shuffle,
                ),
            ),
        )
        for n in counts
        for text, (name, settings) in chosen.items()
    ]
    from thinwire.recipes.virtual import Cluster

    clusters = {
        n: Cluster(
            description=hosts(n),
            compute_s=compute_s,
            jitter=jitter,
            recovery_s=parse_duration(recovery, field="recovery"),
            max_steps=steps,
            latency_s=latency_s,
            uplink_latency_s=uplink_latency_s,
        )
        for n in counts
    }
    folder = results_folder(out, f"simulate-{recipe}")
    results = [play(config, clusters[config.workers], text, folder) for text, config in configs]
    typer.echo(json.dumps([as_plain(r) for r in results]) if as_json else table(results))
    note(f"results in {folder}")
    try:
        note(f"page with plots: {write_report(folder).page}")
    except MissingExtra as missing:
        note(f"no page was made: {missing.message} ({missing.hint})")


def parse_workers(text: str) -> list[int]:
    """
    >>> parse_workers("4,6"), parse_workers("4..32")
    ([4, 6], [4, 8, 16, 32])
    """
    counts: list[int] = []
    for word in text.split(","):
        low, dots, high = word.partition("..")
        try:
            first, last = int(low), int(high) if dots else int(low)
        except ValueError:
            raise SettingError(f"workers must be 64, 4,16 or 4..64, got {text!r}") from None
        check(1 <= first <= last <= MOST_WORKERS, "workers", f"from 1 to {MOST_WORKERS:,}", text)
        while first < last:
            counts.append(first)
            first *= 2
        counts.append(last)
    return list(dict.fromkeys(counts))
