"""Plays what `thinwire simulate` was asked for, one strategy with one number of workers at a time."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.output import note
from thinwire.events import Event, Progress, plain
from thinwire.hosts.description import Description
from thinwire.lab.nets import Net
from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig, write_config
from thinwire.strategies import registry as strategies
from thinwire.units import as_bytes, as_metric, as_percent

if TYPE_CHECKING:
    from thinwire.recipes.virtual import Cluster, Simulated

TELL_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Played:
    """One strategy with one number of workers."""

    strategy: str
    """As it was asked for, settings included."""
    simulated: Simulated
    wall_s: float
    folder: Path


def play(config: RunConfig, cluster: Cluster, strategy: str, folder: Path) -> Played:
    """Train, into a run folder of its own below `folder`."""
    from thinwire.recipes.virtual import config_of, simulate

    own = folder / f"{strategy.replace(':', '-')}-{config.workers}"
    own.mkdir()
    write_config(own, config_of(config, cluster))
    title = f"{strategy}, {config.workers} workers"
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
    for words in (*simulated.happened, *_missed(simulated, cluster), *_accounts(simulated)):
        note(f"  {words}")
    return Played(strategy, simulated, time.monotonic() - began_s, own)


def _missed(simulated: Simulated, cluster: Cluster) -> list[str]:
    """Faults for which the run was too short."""
    faults = [str(fault) for fault in cluster.description.faults]
    happened = {words.partition("s: ")[2] for words in simulated.happened}
    return [f"{fault}: the run ended before that" for fault in faults if fault not in happened]


def _accounts(simulated: Simulated) -> list[str]:
    """Those of epochs in which something happened, or else of the last one."""
    told = [words for words in simulated.accounts if "again" in words]
    return told or list(simulated.accounts[-1:])


def as_plain(played: Played) -> dict[str, object]:
    """For JSON."""
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
                played.strategy,
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


def play_sizes(
    net: Net, hosts: Description, strategy: str, times: dict[str, float], steps: int, jitter: float
) -> dict[str, object]:
    """How long steps of `net` take; nothing is trained."""
    from thinwire.simulate.network import Network
    from thinwire.simulate.pace import Compute
    from thinwire.simulate.sizes import pace
    from thinwire.simulate.worker import Ways

    began_s = time.monotonic()
    note(f"{strategy}, {len(hosts.hosts)} workers, sizes alone ...")
    shapes = [shape for layer in net.layers for shape in layer.shapes]
    shares = [
        share / len(layer.shapes)
        for layer, share in zip(net.layers, net.shares(), strict=True)
        for _ in layer.shapes
    ]
    ways = Ways(compute=Compute(forward_s=net.forward_s, backward_s=net.backward_s), shares=tuple(shares))
    built = strategies.build(*strategies.parse(strategy))
    paced = pace(shapes, Network(hosts, **times), built, ways, steps=steps, jitter=jitter)
    found = {"workers": len(hosts.hosts), "strategy": strategy, "net": net.name, **asdict(paced)}
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
