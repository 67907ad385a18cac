"""What strategies lose on networks that nothing was tuned for, and whether they say so before training.

    python -m benchmarks.held_out --data DIR --minutes 7      in portions: the next command goes on
    python -m benchmarks.held_out --list                      what is trained, and what is missing
    python -m benchmarks.held_out --report                    tables, the result file, and docs/which.md

Whole trainings on the virtual clock: 20 Mbit/s, 0.4 ms latency, 10 ms of compute per step, so that whatever
chooses by itself how much to send has to choose little. All strategies have the same data, epochs, schedule
and samples per step over all workers. Recipes with AdamW and Muon are trained with the longer steps of
`step_scale` and (`--steps-as-set`) without.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch

from benchmarks.common import ROOT, note, parser_of, print_head, print_row, result_file
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.config import resolve
from thinwire.recipes.setup import RunSetup
from thinwire.recipes.virtual import VirtualCluster, virtual_training
from thinwire.strategies import base

EXACT = "all-reduce"
OWN = "benchmarks.held_out_recipes:"
GLOBAL_BATCH = {
    "digits-cnn": 64,
    "mnist-cnn": 128,
    "higgs-mlp": 256,
    f"{OWN}cnn": 64,
    f"{OWN}text_adamw": 32,
    f"{OWN}text_muon": 32,
    f"{OWN}text_adamw_high": 32,
}
"""Recipes, with the samples of all workers in a step."""
EPOCHS = {"mnist-cnn": 1}
STRATEGIES = (
    EXACT,
    "gossip-grad",
    "gossip-grad:share=auto",
    "sasgd:interval=auto",
    "trickle",
    "trickle:density=0.03",
    "gtopk:density=0.01:warmup_steps={warmup}",
    "sasgd:interval=8",
    "sasgd:interval=32",
)
WITH_SGD = (f"{OWN}cnn",)
WORKERS = (4, 8)
PAGE = ROOT / "docs" / "which.md"
BLOCK = re.compile(r"(<!-- held out: generated -->\n).*?(\n<!-- held out: end -->)", flags=re.DOTALL)
MAY_LOSE = 0.5
"""Points of accuracy, or percent of perplexity, that need no warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRun:
    """One training, before and after."""

    recipe: str
    workers: int
    strategy: str
    seed: int
    longest: float = base.LONGEST_STEP
    """What steps of normalised optimizers are multiplied by, at most."""
    trained: str = ""
    """The strategy with {warmup}, an eighth of the steps, replaced."""
    epochs: int = 0
    batch_size: int = 0
    """Of one worker."""
    steps: int = 0
    metric: str = ""
    value: float | None = None
    sent_bytes_per_step: float = 0.0
    advice: str = ""
    """What was said before training."""

    @property
    def key(self) -> tuple[object, ...]:
        return (self.recipe, self.workers, self.strategy, self.seed, self.longest)


def wanted(arguments: argparse.Namespace) -> Iterator[HeldOutRun]:
    """All trainings, the first seed of everything first."""
    recipes, seeds = arguments.recipes.split(","), map(int, arguments.seeds.split(","))
    counts = list(map(int, arguments.workers.split(",")))
    longest = 1.0 if arguments.steps_as_set else base.LONGEST_STEP
    texts = dict.fromkeys(arguments.strategies.split(","))
    for seed, recipe, workers, text in product(seeds, recipes, counts, texts):
        yield HeldOutRun(recipe=recipe, workers=workers, strategy=text, seed=seed, longest=longest)


def train(run: HeldOutRun, data: Path) -> HeldOutRun:
    """Train to the end, in this process."""
    torch.set_num_threads(1)
    recipe = registry.get(run.recipe)
    own = None if run.recipe == "digits-cnn" else data
    config = resolve(
        run.recipe,
        EXACT,
        workers=run.workers,
        batch_size=GLOBAL_BATCH[run.recipe] // run.workers,
        epochs=EPOCHS.get(run.recipe, recipe.epochs),
        seed=run.seed,
        data=own,
        device="cpu",
    )
    num_steps = RunSetup.load(recipe, config).plan(run.workers).num_steps
    text = run.strategy.format(warmup=num_steps // 8)
    named = resolve(run.recipe, text, workers=run.workers, device="cpu", data=own)
    config = replace(config, strategy=named.strategy, settings=named.settings)
    cluster = VirtualCluster(
        description=describe(hosts=run.workers, rate="20mbit"), latency_s=0.0004, compute_s=0.01
    )
    base.LONGEST_STEP = run.longest
    with virtual_training(recipe, config, cluster) as training:
        while not training.done:
            training.epoch()
        told = training.result().summary
    return replace(
        run,
        trained=text,
        epochs=config.epochs,
        batch_size=config.batch_size,
        steps=told.steps,
        metric=told.metric,
        value=told.value,
        sent_bytes_per_step=told.sent_bytes_per_step,
        advice=told.advice,
    )


def lost(run: HeldOutRun, runs: Sequence[HeldOutRun]) -> float | None:
    """Points of accuracy, or percent of perplexity, against exact SGD with the same seed."""
    exact = next(
        (
            r
            for r in runs
            if (r.recipe, r.workers, r.strategy, r.seed) == (run.recipe, run.workers, EXACT, run.seed)
        ),
        None,
    )
    if exact is None or exact.value is None or run.value is None:
        return None
    if run.metric == "accuracy":
        return 100 * (exact.value - run.value)
    return 100 * (run.value / exact.value - 1)


def report(runs: Sequence[HeldOutRun]) -> None:
    """A row for each recipe, number of workers and strategy."""
    print_head("recipe", "workers", "strategy", "steps x", "metric", "lost", "of each seed", "said before")
    for kind in dict.fromkeys((run.recipe, run.workers, run.strategy, run.longest) for run in runs):
        own = [
            r for r in runs if (r.recipe, r.workers, r.strategy, r.longest) == kind and r.value is not None
        ]
        if not own:
            continue
        scale = 100 if own[0].metric == "accuracy" else 1
        mean = scale * statistics.mean(run.value for run in own if run.value is not None)
        losses = [loss for run in own if (loss := lost(run, runs)) is not None]
        mean_loss = statistics.mean(losses) if losses else 0.0
        silent = "nothing" if mean_loss <= MAY_LOSE else "NOTHING"
        each = ", ".join(f"{loss:+.2f}" for loss in losses)
        recipe, workers, strategy, longest = kind
        told = own[0].advice or silent
        print_row(
            recipe.removeprefix(OWN),
            workers,
            strategy,
            longest,
            f"{mean:.2f}",
            f"{mean_loss:+.2f}",
            each,
            told,
        )


def overview(runs: Sequence[HeldOutRun]) -> str:
    """What was lost, a row for each recipe, number of workers and factor; in brackets the number of seeds."""
    strategies = [text for text in STRATEGIES if text != EXACT and any(run.strategy == text for run in runs)]
    names = [f"`{text.partition(':warmup')[0]}`" for text in strategies]
    lines = [["recipe, workers", "steps", "rate x", "exact SGD", *names], ["---"] * (4 + len(names))]
    for recipe, workers, longest in sorted({(r.recipe, r.workers, r.longest) for r in runs}):
        own = [r for r in runs if (r.recipe, r.workers, r.longest) == (recipe, workers, longest)]
        exact = [r.value for r in runs if (r.recipe, r.workers, r.strategy) == (recipe, workers, EXACT)]
        values = [value for value in exact if value is not None]
        if not values:
            continue
        accuracy = own[0].metric == "accuracy"
        cells = []
        for text in strategies:
            found = [loss for r in own if r.strategy == text and (loss := lost(r, runs)) is not None]
            unit = "" if accuracy else " %"
            cells.append(f"{statistics.mean(found):+.1f}{unit} ({len(found)})" if found else "")
        shown = f"{100 * statistics.mean(values):.1f} %" if accuracy else f"{statistics.mean(values):.2f}"
        factor = "1" if recipe in WITH_SGD else f"{longest:g}"
        name = recipe.removeprefix(OWN).replace("_", "-")
        lines.append([f"`{name}`, {workers}", str(own[0].steps), factor, shown, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the data of all recipes (docs/recipes.md)")
    parser.add_argument("--recipes", default=",".join(GLOBAL_BATCH), help="comma-separated")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated (all)")
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)), help="comma-separated (4,8)")
    parser.add_argument("--seeds", default="0,1", help="comma-separated (0,1)")
    parser.add_argument("--steps-as-set", action="store_true", help="without longer steps for AdamW and Muon")
    parser.add_argument("--minutes", type=float, default=7.0, help="time after which none is begun (7)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "held_out.jsonl", help="what is done")
    parser.add_argument("--list", action="store_true", help="only say what would be trained")
    parser.add_argument("--report", action="store_true", help="only print and keep what is done")
    return parser.parse_args(arguments)


def main() -> None:
    """Train what is missing until the time is up; or list it; or print and keep what is there."""
    arguments = parse()
    file, until_s = result_file("held_out"), time.monotonic() + 60 * arguments.minutes
    lines = arguments.work.read_text().splitlines() if arguments.work.exists() else []
    runs = [HeldOutRun(**json.loads(line)) for line in lines]
    if arguments.report:
        report(runs)
        text = PAGE.read_text(encoding="utf-8")
        table = overview(runs)
        PAGE.write_text(BLOCK.sub(lambda match: match[1] + table + match[2], text), encoding="utf-8")
        note(f"saved {file.save({}, runs=[asdict(run) for run in runs])}")
        return
    done = {run.key for run in runs}
    missing = [run for run in wanted(arguments) if run.key not in done]
    if arguments.list:
        print("\n".join(str(run.key) for run in missing))
        return
    for index, run in enumerate(missing):
        if time.monotonic() > until_s:
            sys.exit(f"{len(missing) - index} trainings left: run the same command again")
        began_s = time.monotonic()
        made = train(run, arguments.data)
        with arguments.work.open("a") as kept:
            kept.write(json.dumps(asdict(made)) + "\n")
        note(f"{made.key}: {made.value}, {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
