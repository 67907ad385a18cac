"""Accuracy under losses: kill half of the workers, add half, kill the first; beside the undisturbed run.

    python -m benchmarks.elastic_accuracy --data DIR --epochs 8 --seeds 0 1 2

cifar-resnet20 on the virtual clock, four workers, exact SGD: hosts 2 and 3 are killed after 29 % of the
training, join again at 45 %, and host 0 is killed at 75 %. Both trainings have the same schedule. The
convolutions run in bfloat16 (autocast) and with colours last, which is 1.7 times faster on a processor;
parameters, sums and the optimizer are float32. Trainings that the result file has are not repeated.
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

from benchmarks.common import RESULTS, note, parser_of, print_head, print_row
from thinwire.bench.config import provenance
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.base import Carried, Recipe, Training
from thinwire.recipes.config import RunConfig, resolve
from thinwire.recipes.virtual import VirtualCluster, virtual_training

RECIPE = "cifar-resnet20"
WORKERS, BATCH_SIZE = 4, 32
COMPUTE_S = 0.1
LOST_AT, BACK_AT, FIRST_AT = 0.29, 0.45, 0.75
"""Parts of all samples of the training."""


def forward(model: nn.Module, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs.contiguous(memory_format=torch.channels_last))
    return outputs.float(), carried


def fast_recipe() -> Recipe:
    """The recipe of the catalog, with its convolutions in bfloat16."""
    recipe = registry.get(RECIPE)

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


def train(config: RunConfig, *, disturbed: bool, num_samples: int) -> dict[str, Any]:
    """One training; its accuracy after every epoch and what happened in it."""
    began_s, lost = time.monotonic(), list[float]()
    faults = faults_of(config.epochs, num_samples) if disturbed else []
    description = describe(hosts=WORKERS, rate="1gbit", faults=faults)
    cluster = VirtualCluster(description=description, latency_s=0.0004, compute_s=COMPUTE_S, recovery_s=0.5)
    with virtual_training(fast_recipe(), config, cluster) as training:
        while not training.done:
            evaluated = training.epoch()
            lost.append(round(100 * (evaluated.value or 0.0), 2))
            note(f"{'disturbed' if disturbed else 'undisturbed'} {config.seed}: {lost}")
        result = training.result()
    return {
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
    print_head("seed", "undisturbed, %", "disturbed, %")
    ends = {(run["seed"], run["disturbed"]): run["values"][-1] for run in runs}
    seeds = [
        seed for seed in sorted({run["seed"] for run in runs}) if {(seed, False), (seed, True)} <= set(ends)
    ]
    for seed in seeds:
        print_row(seed, ends[seed, False], ends[seed, True])
    if seeds:
        means = [fmean(ends[seed, kind] for seed in seeds) for kind in (False, True)]
        print_row("mean", *(f"{mean:.2f}" for mean in means))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=50_000, help="of the data set: when faults come")
    parser.add_argument("--result", type=Path, default=RESULTS / "elastic_accuracy.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    saved = json.loads(options.result.read_text()) if options.result.exists() else {}
    begin, runs = saved.get("begin", provenance()), saved.get("runs", [])
    for seed in options.seeds:
        for disturbed in (False, True):
            key = (seed, disturbed, options.epochs)
            if key in {(run["seed"], run["disturbed"], run["epochs"]) for run in runs}:
                continue
            config = resolve(
                RECIPE,
                "all-reduce",
                workers=WORKERS,
                epochs=options.epochs,
                batch_size=BATCH_SIZE,
                seed=seed,
                data=options.data,
                device="cpu",
            )
            runs.append(train(config, disturbed=disturbed, num_samples=options.samples))
            lines = ",\n  ".join(json.dumps(run) for run in runs)
            head = json.dumps({"begin": begin}, indent=1, default=str)
            options.result.write_text(head[:-2] + ',\n "runs": [\n  ' + lines + "\n ]\n}\n")
    print_table(runs)


if __name__ == "__main__":
    main()
