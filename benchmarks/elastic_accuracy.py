"""Accuracy under losses: kill half of the workers, add half, kill the first; beside the undisturbed run.

    python -m benchmarks.elastic_accuracy --data DIR --recipe mnist-cnn --epochs 3 --seeds 0 1 2
    python -m benchmarks.elastic_accuracy --data DIR --recipe cifar-resnet20 --epochs 8 --seeds 0 1 2
    python -m benchmarks.elastic_accuracy --data DIR --epochs 30 --device cuda --jobs 6 --minutes 9
    python -m benchmarks.elastic_accuracy --recipe digits-cnn --epochs 4      in seconds, to see it work

On the virtual clock, four workers, exact SGD: hosts 2 and 3 are killed after 29 % of the training, join
again at 45 %, and host 0 is killed at 75 %. Both trainings have the same schedule. On a processor, the
convolutions of cifar-resnet20 run in bfloat16 (autocast) and with colours last, which is 1.7 times faster;
parameters, sums and the optimizer are float32. On a GPU all is float32, with TF32 in convolutions and matrix
products; start `nvidia-cuda-mps-control -d` before, so that processes share it instead of taking turns.

`--jobs` trainings go on at once, each in a process. Each writes its curve into the result file after every
epoch, marked as unfinished until it is done: a training that `--minutes` or anything else ended is not lost,
but it cannot be continued. Trainings that the file has to the end are not repeated, and several commands may
add theirs to one file at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import RESULTS, ROOT, alone_in, note, parser_of, print_head, print_row
from benchmarks.map import data_folder
from benchmarks.map_run import write_whole
from thinwire.bench.config import provenance
from thinwire.errors import ThinwireError
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.base import Carried, Recipe, Training
from thinwire.recipes.config import RunConfig, resolve
from thinwire.recipes.setup import choose_device
from thinwire.recipes.virtual import VirtualCluster, virtual_training

WORKERS, BATCH_SIZE = 4, 32
NUM_SAMPLES = {"cifar-resnet20": 50_000, "digits-cnn": 1_437, "mnist-cnn": 60_000}
COMPUTE_S = 0.1
LOST_AT, BACK_AT, FIRST_AT = 0.29, 0.45, 0.75
"""Parts of all samples of the training."""
LEAST_S = 40.0
"""Nothing is begun that has less time left than this, or than the shortest training has taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticTask:
    """One training to do."""

    recipe: str
    disturbed: bool
    seed: int
    epochs: int
    device: str
    """cpu or cuda."""
    threads: int
    data: Path | None

    def __str__(self) -> str:
        return f"{self.recipe}, {self.epochs} epochs, seed {self.seed}, {kind_of(self.disturbed)}"

    @property
    def key(self) -> tuple[object, ...]:
        """What a task and its run have in common."""
        return self.recipe, self.epochs, self.device, self.seed, self.disturbed

    @property
    def config(self) -> RunConfig:
        return resolve(
            self.recipe,
            "all-reduce",
            workers=WORKERS,
            epochs=self.epochs,
            batch_size=BATCH_SIZE,
            seed=self.seed,
            data=self.data,
            device=self.device,
        )


def kind_of(disturbed: bool) -> str:
    return "disturbed" if disturbed else "undisturbed"


def key_of(run: dict[str, Any]) -> tuple[object, ...]:
    device = "cpu" if run.get("device", "cpu") == "cpu" else "cuda"
    return run["recipe"], run["epochs"], device, run["seed"], run["disturbed"]


def forward(model: nn.Module, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs.contiguous(memory_format=torch.channels_last))
    return outputs.float(), carried


def fast_recipe(name: str, device: str) -> Recipe:
    """The recipe of the catalog; of a large net on a processor, with convolutions in bfloat16."""
    recipe = registry.get(name)
    if name != "cifar-resnet20" or device != "cpu":
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


def train(task: ElasticTask, result: Path, deadline_s: float) -> dict[str, Any]:
    """One training, until it is done or there is no time for another epoch; what is there of it is in the
    result file after every epoch.

    `deadline_s` is on the machine's monotonic clock.
    """
    torch.set_num_threads(task.threads)
    torch.backends.cudnn.benchmark = True  # batches have the same shape nearly all along
    torch.backends.cuda.matmul.allow_tf32 = True  # as convolutions have it by default
    begin = json.loads(json.dumps(provenance(), default=str))
    began_s = time.monotonic()
    faults = faults_of(task.epochs, NUM_SAMPLES[task.recipe]) if task.disturbed else []
    description = describe(hosts=WORKERS, rate="1gbit", faults=faults)
    cluster = VirtualCluster(description=description, latency_s=0.0004, compute_s=COMPUTE_S, recovery_s=0.5)
    run: dict[str, Any] = {
        "recipe": task.recipe,
        "disturbed": task.disturbed,
        "seed": task.seed,
        "epochs": task.epochs,
        "batch_size": BATCH_SIZE,
        "device": "cpu" if task.device == "cpu" else torch.cuda.get_device_name(),
        "values": [],
    }
    with virtual_training(fast_recipe(task.recipe, task.device), task.config, cluster) as training:
        while not training.done:
            epoch_s = time.monotonic()
            evaluated = training.epoch()
            now_s = time.monotonic()
            run["values"].append(round(100 * (evaluated.value or 0.0), 2))
            run |= {"steps": evaluated.step, "wall_s": round(now_s - began_s)}
            add_run(result, {**run, "unfinished": True, "begin": begin})
            note(f"{task}: epoch {evaluated.epoch}, {run['values'][-1]} %, {run['wall_s']} s")
            if now_s + 1.1 * (now_s - epoch_s) > deadline_s:
                break
        if len(run["values"]) < task.epochs:
            return {**run, "unfinished": True}
        ended = training.result()
    run |= {
        "steps": ended.summary.steps,
        "happened": list(ended.happened),
        "accounts": list(ended.accounts),
        "wall_s": round(time.monotonic() - began_s),
    }
    add_run(result, {**run, "begin": begin})
    return run


def train_all(waiting: Sequence[ElasticTask], result: Path, jobs: int, deadline_s: float) -> list[str]:
    """Train, some at once, until the deadline; returns what went wrong, in words."""
    waiting, failures, ended_in_s = list(waiting), list[str](), list[float]()
    running: dict[Future[dict[str, Any]], ElasticTask] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        while waiting or running:
            least_s = max(LEAST_S, min(ended_in_s, default=0.0))
            while waiting and len(running) < jobs and time.monotonic() < deadline_s - least_s:
                task = waiting.pop(0)
                running[pool.submit(train, task, result, deadline_s)] = task
            if not running:
                break
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                task, error = running.pop(future), future.exception()
                if error is not None:
                    failures.append(f"{task}: {type(error).__name__}: {error}")
                    note(f"failed: {failures[-1]}")
                elif not (run := future.result()).get("unfinished"):
                    ended_in_s.append(run["wall_s"])
    for task in waiting:
        note(f"not begun: {task}")
    return failures


def print_table(runs: Sequence[dict[str, Any]]) -> None:
    """Seeds that have both trainings, and what is unfinished."""
    print_head("recipe", "epochs", "device", "seed", "undisturbed, %", "disturbed, %")
    ends = {key_of(run): run["values"][-1] for run in runs if not run.get("unfinished")}
    for recipe, epochs, device in sorted({key[:3] for key in ends}, key=str):
        rows = []
        for seed in sorted({run["seed"] for run in runs}):
            keys = [(recipe, epochs, device, seed, disturbed) for disturbed in (False, True)]
            if all(key in ends for key in keys):
                rows.append([ends[key] for key in keys])
                print_row(recipe, epochs, device, seed, *rows[-1])
        if rows:
            means = [fmean(values) for values in zip(*rows, strict=True)]
            print_row(recipe, epochs, device, "mean", *(f"{mean:.2f}" for mean in means))
    for run in runs:
        if run.get("unfinished"):
            recipe, epochs, device, seed, disturbed = key_of(run)
            values = run["values"]
            what = f"{recipe}, {device}, seed {seed}, {kind_of(bool(disturbed))}"
            print(f"unfinished: {what}: {values[-1]} % after {len(values)} of {epochs} epochs")


def read_runs(path: Path) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    return runs


def add_run(path: Path, run: dict[str, Any]) -> None:
    """Add one training to the file, which other processes may be writing to as well.

    It takes the place of the same training's unfinished curve, unless that is longer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(path.parent):
        runs = read_runs(path)
        for other in [other for other in runs if key_of(other) == key_of(run)]:
            longer = len(other["values"]) > len(run["values"])
            if run.get("unfinished") and (longer or not other.get("unfinished")):
                return
            runs.remove(other)
        lines = ",\n  ".join(json.dumps(each) for each in [*runs, run])
        text = '{\n "runs": [\n  ' + lines + "\n ]\n}\n"
        write_whole(path, lambda part: part.write_text(text))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    data = os.environ.get("THINWIRE_DATA")
    parser.add_argument("--data", type=Path, default=data, help="folder with the data (or $THINWIRE_DATA)")
    parser.add_argument("--recipe", choices=sorted(NUM_SAMPLES), default="cifar-resnet20")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--only", choices=("undisturbed", "disturbed"), help="one of the two trainings of a seed"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once (1)")
    parser.add_argument("--threads", type=int, default=1, help="of each training, on the CPU (1)")
    parser.add_argument("--minutes", type=float, default=60 * 24, help="time for all of it (a day)")
    parser.add_argument(
        "--result", "--out", type=Path, default=RESULTS / "elastic_accuracy.json", help="the JSON file"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / "runs" / "elastic_accuracy", help="folder for unpacked data"
    )
    return parser.parse_args(arguments)


def tasks(options: argparse.Namespace) -> list[ElasticTask]:
    """All trainings that the result file has not to the end."""
    data = None
    if options.recipe != "digits-cnn" and options.data is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        with alone_in(options.work):  # another command may be unpacking the same
            data = data_folder(options.data, options.work)
    device = choose_device(options.device, 0).type
    kinds = [kind for kind in (False, True) if options.only in (None, kind_of(kind))]
    asked = [
        ElasticTask(
            recipe=options.recipe,
            disturbed=disturbed,
            seed=seed,
            epochs=options.epochs,
            device=device,
            threads=options.threads,
            data=data,
        )
        for seed, disturbed in product(options.seeds, kinds)
    ]
    _ = asked[0].config  # missing data is said before anything begins
    done = {key_of(run) for run in read_runs(options.result) if not run.get("unfinished")}
    return [task for task in asked if task.key not in done]


def main() -> None:
    options = parse()
    deadline_s = time.monotonic() + 60 * options.minutes
    try:
        waiting = tasks(options)
    except ThinwireError as error:
        sys.exit(f"error: {error}")
    failures = train_all(waiting, options.result.absolute(), options.jobs, deadline_s)
    print_table(read_runs(options.result))
    if failures:
        sys.exit("\n".join(f"failed: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
