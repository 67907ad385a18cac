"""`thinwire simulate`: many workers in one process; real training, virtual time."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli.output import note
from thinwire.cli.run import empty_folder
from thinwire.errors import SettingError, check
from thinwire.events import Event, Progress, plain
from thinwire.hosts.description import Description, describe
from thinwire.hosts.durations import parse_duration
from thinwire.lab.nets import Net, parse_net
from thinwire.recipes import registry
from thinwire.recipes.config import Choices, resolve, write_config
from thinwire.strategies import registry as strategies
from thinwire.units import as_bytes, as_metric, as_percent

if TYPE_CHECKING:
    from thinwire.recipes.virtual import Cluster, Simulated

DEFAULT_STRATEGIES = ("silent", "all-reduce")
TELL_EVERY_S = 5.0
MOST_WORKERS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A strategy as it was asked for: `all-reduce:overlap=forward`."""

    text: str
    name: str
    settings: dict[str, str]


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
            metavar="NAME[:KEY=VALUE,...]",
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
    chosen = [parse_strategy(text) for text in strategy or DEFAULT_STRATEGIES]

    def hosts(count: int) -> Description:
        return describe(
            hosts=count, rate=rate, sites=sites, uplink=uplink, slow=slow or [], faults=fault or []
        )

    for count in counts:
        hosts(count)  # a mistake is told before anything is simulated
    times = {
        "latency_s": parse_duration(latency, field="latency"),
        "uplink_latency_s": parse_duration(uplink_latency, field="uplink latency"),
    }
    compute_s = None if compute is None else parse_duration(compute, field="compute")
    if emulate is not None:
        check(compute_s is None, "compute", "left out with --emulate, which states it", compute)
        net = parse_net(emulate)
        rows = [_sizes(net, hosts(n), c, times, steps or 5, jitter) for n in counts for c in chosen]
        typer.echo(json.dumps(rows) if as_json else sizes_table(rows))
        return
    found = registry.get(recipe)
    configs = [
        resolve(
            recipe,
            found,
            Choices(
                strategy=c.name,
                settings=c.settings,
                workers=n,
                epochs=epochs,
                batch_size=batch_size,
                seed=seed,
                data=data,
                device=device,
            ),
        )
        for n in counts
        for c in chosen
    ]
    folder = empty_folder(out, f"simulate-{recipe}")
    from thinwire.recipes.virtual import Cluster

    results = []
    for config, (count, c) in zip(configs, [(n, c) for n in counts for c in chosen], strict=True):
        cluster = Cluster(
            description=hosts(count),
            compute_s=compute_s,
            jitter=jitter,
            recovery_s=parse_duration(recovery, field="recovery"),
            max_steps=steps,
            **times,
        )
        results.append(_play(config, cluster, c, folder))
    _draw(folder)
    typer.echo(json.dumps([_plain(r) for r in results]) if as_json else table(results))
    if not as_json:
        typer.echo(f"\nresults in {folder}; `thinwire report {folder}` draws them")


@dataclass(frozen=True, slots=True)
class Played:
    """One strategy with one number of workers."""

    chosen: Chosen
    simulated: Simulated
    wall_s: float
    folder: Path


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
    return counts


def parse_strategy(text: str) -> Chosen:
    """A name, and its settings after a colon; built once, so that a wrong one is refused here."""
    name, _, rest = text.partition(":")
    settings = {}
    for word in filter(None, rest.split(",")):
        key, equals, value = word.partition("=")
        check(bool(equals), "strategy", "NAME or NAME:KEY=VALUE,...", text)
        settings[key] = value
    strategies.build(name, settings)
    return Chosen(text=text, name=name, settings=settings)


def _play(config: Any, cluster: Cluster, chosen: Chosen, folder: Path) -> Played:
    from thinwire.recipes.virtual import config_of, simulate

    own = folder / f"{chosen.text.replace(':', '-').replace(',', '-')}-{config.workers}"
    own.mkdir()
    write_config(own, config_of(config, cluster))
    title = f"{chosen.text}, {config.workers} workers"
    note(f"{title} ...")
    began_s = told_s = time.monotonic()

    def watch(event: Event) -> None:
        nonlocal told_s
        if (
            isinstance(event.record, Progress)
            and event.rank == 0
            and time.monotonic() - told_s > TELL_EVERY_S
        ):
            told_s, progress = time.monotonic(), event.record
            loss = "" if progress.loss is None else f", loss {progress.loss:.4g}"
            note(
                f"  step {progress.step} of {progress.num_steps}{loss}, {progress.train_s:.4g} virtual s, "
                f"{told_s - began_s:.0f} s here"
            )

    simulated = simulate(registry.get(config.recipe), config, cluster, own, watch)
    for words in (*simulated.happened, *_accounts(simulated)):
        note(f"  {words}")
    return Played(chosen, simulated, time.monotonic() - began_s, own)


def _accounts(simulated: Simulated) -> list[str]:
    """Those of epochs in which something happened, or else of the last one."""
    told = [words for words in simulated.accounts if "again" in words]
    return told or list(simulated.accounts[-1:])


def _plain(played: Played) -> dict[str, object]:
    simulated = asdict(played.simulated)
    simulated.pop("summary")
    ours = {**plain(played.simulated.summary), **simulated}
    return {**ours, "wall_s": played.wall_s, "run": str(played.folder)}


def table(results: list[Played]) -> str:
    """The results for people."""
    metric = results[0].simulated.summary.metric
    head = [
        "workers",
        "strategy",
        metric,
        "loss",
        "virtual s",
        "s/step",
        "exposed",
        "sent/step",
        "apart",
        "here",
    ]
    rows = [head]
    for played in results:
        summary = played.simulated.summary
        rows.append(
            [
                str(summary.workers),
                played.chosen.text,
                "-" if summary.value is None else as_metric(metric, summary.value),
                "-" if summary.loss is None else f"{summary.loss:.4g}",
                f"{summary.train_s:.4g}",
                f"{summary.train_s / summary.steps:.4g}",
                as_percent(summary.exposed_share),
                as_bytes(summary.sent_bytes_per_step),
                f"{played.simulated.distance:.2g}",
                f"{played.wall_s:.0f} s",
            ]
        )
    return aligned(rows)


def _sizes(
    net: Net, hosts: Description, chosen: Chosen, times: dict[str, float], steps: int, jitter: float
) -> dict[str, object]:
    from thinwire.simulate.network import Network
    from thinwire.simulate.pace import Compute
    from thinwire.simulate.sizes import pace
    from thinwire.simulate.worker import Ways

    began_s = time.monotonic()
    note(f"{chosen.text}, {len(hosts.hosts)} workers, sizes alone ...")
    shapes = [shape for layer in net.layers for shape in layer.shapes]
    shares = [
        share / len(layer.shapes)
        for layer, share in zip(net.layers, net.shares(), strict=True)
        for _ in layer.shapes
    ]
    ways = Ways(compute=Compute(forward_s=net.forward_s, backward_s=net.backward_s), shares=tuple(shares))
    strategy = strategies.build(chosen.name, chosen.settings)
    paced = pace(shapes, Network(hosts, **times), strategy, ways, steps=steps, jitter=jitter)
    found = {"workers": len(hosts.hosts), "strategy": chosen.text, "net": net.name, **asdict(paced)}
    return {**found, "wall_s": time.monotonic() - began_s}


def sizes_table(rows: list[dict[str, Any]]) -> str:
    """Step times for people."""
    lines = [["workers", "strategy", "s/step", "exposed s", "sent/step", "messages", "here"]]
    for row in rows:
        times = [f"{row['step_s']:.4g}", f"{row['exposed_s']:.4g}"]
        sent = [as_bytes(row["sent_bytes"]), f"{row['messages']:.4g}"]
        lines.append([str(row["workers"]), row["strategy"], *times, *sent, f"{row['wall_s']:.1f} s"])
    return aligned(lines)


def aligned(rows: list[list[str]]) -> str:
    """Columns as wide as they need to be; names to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 1 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _draw(folder: Path) -> None:
    from thinwire.cli.curves import draw
    from thinwire.errors import MissingExtra

    try:
        draw(folder)
    except MissingExtra as error:
        note(f"no plots: {error.message}; {error.hint}")
