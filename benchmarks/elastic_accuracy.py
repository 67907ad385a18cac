"""Accuracy under losses: kill half of the workers, add half, kill the first; beside the undisturbed run.

    python -m benchmarks.elastic_accuracy --data DIR --recipe mnist-cnn --epochs 3 --seeds 0 1 2
    python -m benchmarks.elastic_accuracy --data DIR --recipe cifar-resnet20 --epochs 8 --seeds 0 1 2

On the virtual clock, four workers, exact SGD: hosts 2 and 3 are killed after 29 % of the training, join
again at 45 %, and host 0 is killed at 75 %. Both trainings have the same schedule. On a processor, the
convolutions of cifar-resnet20 run in bfloat16 (autocast) and with colours last, which is 1.7 times faster;
parameters, sums and the optimizer are float32. Trainings that the result file has are not repeated, and
several commands may add theirs to one file at the same time.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS, alone_in, note, parser_of, print_head, print_row
from thinwire.bench.config import provenance
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.base import Carried, Recipe, Training
from thinwire.recipes.config import RunConfig, resolve
from thinwire.recipes.virtual import VirtualCluster, virtual_training

WORKERS, BATCH_SIZE = 4, 32
NUM_SAMPLES = {"cifar-resnet20": 50_000, "mnist-cnn": 60_000}
COMPUTE_S = 0.1
LOST_AT, BACK_AT, FIRST_AT = 0.29, 0.45, 0.75
"""Parts of all samples of the training."""


def forward(model: nn.Module, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs.contiguous(memory_format=torch.channels_last))
    return outputs.float(), carried


def fast_recipe(name: str) -> Recipe:
    """The recipe of the catalog; of a large net, with convolutions in bfloat16."""
    recipe = registry.get(name)
    if name == "mnist-cnn":
        return recipe

    def training() -> Training:
        return replace(recipe.training(), forward=forward)

    return replace(recipe, training=training)


def faults_of(epochs: int, num_samples: int) -> list[str]:
    """Faults by step: half of the workers make half as many samples a step."""
    samples, whole = epochs * num_samples, WORKERS * BATCH_SIZE
    lost = int(LOST_AT * samples / whole)
    back = lost + int((BACK_AT - LOST_AT) * samples / (whole / 2))
    first = back + int((FIRST_AT - BACK_AT) * samples / whole)
    kills = [f"kill:host={host},step={lost}" for host in (2, 3)]
    joins = [f"rejoin:host={host},step={back}" for host in (2, 3)]
    return [*kills, *joins, f"kill:host=0,step={first}"]


def train(config: RunConfig, *, disturbed: bool) -> dict[str, Any]:
    """One training; its accuracy after every epoch and what happened in it."""
    began_s, lost = time.monotonic(), list[float]()
    faults = faults_of(config.epochs, NUM_SAMPLES[config.recipe]) if disturbed else []
    description = describe(hosts=WORKERS, rate="1gbit", faults=faults)
    cluster = VirtualCluster(description=description, latency_s=0.0004, compute_s=COMPUTE_S, recovery_s=0.5)
    with virtual_training(fast_recipe(config.recipe), config, cluster) as training:
        while not training.done:
            evaluated = training.epoch()
            lost.append(round(100 * (evaluated.value or 0.0), 2))
            note(f"{config.recipe} {'disturbed' if disturbed else 'undisturbed'} {config.seed}: {lost}")
        result = training.result()
    return {
        "recipe": config.recipe,
        "disturbed": disturbed,
        "seed": config.seed,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "values": lost,
        "steps": result.summary.steps,
        "happened": list(result.happened),
        "accounts": list(result.accounts),
        "wall_s": round(time.monotonic() - began_s),
    }


def print_table(runs: list[dict[str, Any]]) -> None:
    print_head("recipe", "epochs", "seed", "undisturbed, %", "disturbed, %")
    ends = {(*_key(run)[:3], run["disturbed"]): run["values"][-1] for run in runs}
    for recipe, epochs in sorted({key[:2] for key in ends}):
        seeds = sorted({key[2] for key in ends if key[:2] == (recipe, epochs)})
        whole = [
            seed for seed in seeds if {(recipe, epochs, seed, kind) for kind in (False, True)} <= set(ends)
        ]
        pairs = [[ends[recipe, epochs, seed, kind] for kind in (False, True)] for seed in whole]
        for seed, pair in zip(whole, pairs, strict=True):
            print_row(recipe, epochs, seed, *pair)
        if pairs:
            means = [fmean(values) for values in zip(*pairs, strict=True)]
            print_row(recipe, epochs, "mean", *(f"{mean:.2f}" for mean in means))


def _key(run: dict[str, Any]) -> tuple[str, int, int, bool]:
    return run["recipe"], run["epochs"], run["seed"], run["disturbed"]


def read_runs(path: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    return runs


def add_run(path: Path, run: dict[str, Any]) -> None:
    """Add one training to the file, which another process may be writing to as well."""
    with alone_in(path.parent):
        lines = ",\n  ".join(json.dumps(each) for each in [*read_runs(path), run])
        path.write_text('{\n "runs": [\n  ' + lines + "\n ]\n}\n")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", choices=sorted(NUM_SAMPLES), default="cifar-resnet20")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--only", choices=("undisturbed", "disturbed"), help="one of the two trainings of a seed"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--result", type=Path, default=RESULTS / "elastic_accuracy.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kinds = [kind for kind in (False, True) if options.only in (None, "disturbed" if kind else "undisturbed")]
    for seed in options.seeds:
        for disturbed in kinds:
            config = resolve(
                options.recipe,
                "all-reduce",
                workers=WORKERS,
                epochs=options.epochs,
                batch_size=BATCH_SIZE,
                seed=seed,
                data=options.data,
                device="cpu",
            )
            done = {_key(run) for run in read_runs(options.result)}
            if (options.recipe, options.epochs, seed, disturbed) not in done:
                begin = provenance()
                run = train(config, disturbed=disturbed)
                add_run(options.result, {**run, "begin": json.loads(json.dumps(begin, default=str))})
    print_table(read_runs(options.result))


if __name__ == "__main__":
    main()
