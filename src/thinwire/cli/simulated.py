"""Runs simulations for `thinwire simulate`, and their tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli.output import columns, note, results_folder
from thinwire.events import Event, Progress, plain
from thinwire.hosts.description import Description
from thinwire.lab.nets import Net
from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig, resolve, write_config
from thinwire.strategies import registry as strategies
from thinwire.units import as_bytes, as_metric, as_percent

if TYPE_CHECKING:
    from thinwire.recipes.virtual import VirtualCluster

NOTE_EVERY_S = 5.0


def play(
    recipe: str,
    hosts: Sequence[Description],
    texts: Sequence[str],
    choices: Mapping[str, Any],
    cluster: Mapping[str, Any],
    out: Path | None,
) -> list[dict[str, Any]]:
    """Train `recipe` with every strategy on all `hosts`; all settings are checked before the first one."""
    from thinwire.recipes.virtual import VirtualCluster

    planned = [
        (
            resolve(recipe, text, workers=len(description.hosts), **choices),
            VirtualCluster(description=description, **cluster),
            text,
        )
        for description, text in product(hosts, dict.fromkeys(texts))
    ]
    folder = results_folder(out, f"simulate-{recipe}")
    return [_play_one(*each, folder) for each in planned]


def _play_one(config: RunConfig, cluster: VirtualCluster, text: str, folder: Path) -> dict[str, Any]:
    from thinwire.recipes.virtual import simulate

    own = folder / f"{text.replace(':', '-')}-{config.workers}"
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


def results_table(results: list[dict[str, Any]]) -> str:
    metric = results[0]["metric"]
    head = f"workers|strategy|{metric}|loss|virtual s|s/step|exposed|sent/step|apart|here"
    rows = [head.split("|")]
    for result in results:
        row = [str(result["workers"]), result["asked"]]
        row += ["-" if result["value"] is None else as_metric(metric, result["value"])]
        row += ["-" if result["loss"] is None else f"{result['loss']:.4g}"]
        row += [f"{result['train_s']:.4g}", f"{result['train_s'] / result['steps']:.4g}"]
        row += [as_percent(result["exposed_share"]), as_bytes(result["sent_bytes_per_step"])]
        rows.append([*row, f"{result['distance']:.2g}", f"{result['wall_s']:.0f} s"])
    return columns(rows, left=1)


def play_sizes(
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
        paced = step_times(
            shapes, Network(description, **latencies), strategy, model, steps=steps, jitter=jitter
        )
        row = {"workers": workers, "strategy": text, "net": net.name, **asdict(paced)}
        rows.append({**row, "wall_s": time.monotonic() - began_s})
    return rows


def sizes_table(rows: list[dict[str, Any]]) -> str:
    lines = [["workers", "strategy", "s/step", "exposed s", "sent/step", "messages", "here"]]
    for row in rows:
        times = [f"{row['step_s']:.4g}", f"{row['exposed_s']:.4g}"]
        sent = [as_bytes(row["sent_bytes"]), f"{row['messages']:.4g}"]
        lines.append([str(row["workers"]), row["strategy"], *times, *sent, f"{row['wall_s']:.1f} s"])
    return columns(lines, left=1)
