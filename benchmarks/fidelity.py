"""The cost of a strategy in accuracy: exact SGD against every lossy strategy, on the virtual clock.

    python -m benchmarks.fidelity --data DIR --recipes cifar-resnet20,mnist-cnn,ptb-lstm --seeds 0,1,2
    python -m benchmarks.fidelity --data DIR --recipes ptb-lstm --seeds 2 --resume FILE
    python -m benchmarks.fidelity --data DIR --recipes benchmarks.sorted_recipes:mnist --shuffles own,ring
    python -m benchmarks.fidelity --quick      digits-cnn on a CPU, half a minute; shows that it works

Every strategy gets the same recipe, epochs, batches, schedule and seeds; only the traffic differs.
`all-reduce` is exact SGD, `silent` is what workers reach that never talk. Runs are independent of each other,
so several go on at once (`--jobs`), each with its replicas batched where that is faster: this keeps a GPU
busy. A study may be cut by recipe, strategy or seed into several commands: with `--resume` a command skips
what an earlier file has, and its own file has both. The table goes to stdout, progress to stderr, everything
measured to benchmarks/results/ after every run, so that what was done before the limit is kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ResultFile, note, parser_of, print_head, print_row, result_file
from benchmarks.fidelity_run import FidelityRun, FidelityTask, train
from benchmarks.gpu import Utilisation
from benchmarks.recipes import prepared
from thinwire.bench.config import provenance
from thinwire.bench.systems import EXACT
from thinwire.errors import DataError, ThinwireError
from thinwire.event_log import EventReader
from thinwire.events import Evaluated, Progress
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.config import resolve
from thinwire.recipes.virtual import VirtualCluster
from thinwire.strategies import registry as strategies

VARIANTS = (
    "gossip-grad:share=0.1",
    "gossip-grad:payload=int8",
    "stochastic-gradient-push",
    "gtopk:warmup_steps=200",
    "oktopk:warmup_steps=200",
)
"""Settings that may cost accuracy, beside those that strategies come with."""
TELL_EVERY_S = 20.0


def tasks(
    arguments: argparse.Namespace, data: Path | None, scratch: Path, deadline_s: float
) -> list[FidelityTask]:
    """Exact SGD of all recipes and seeds first; recipes without data are named and left out."""
    found: list[FidelityTask] = []
    cluster = VirtualCluster(
        description=describe(
            hosts=arguments.workers, rate=arguments.rate, slow=[arguments.slow] if arguments.slow else []
        ),
        latency_s=arguments.latency_ms / 1e3,
        compute_s=arguments.compute,
        bucket_bytes=None if arguments.bucket_mb is None else round(arguments.bucket_mb * 2**20),
    )
    for name in arguments.recipes.split(","):
        recipe = registry.get(name)
        try:
            if recipe.locate is not None:
                recipe.locate(data)
        except DataError as error:
            note(f"left out: {name}: {error.message}")
            continue
        size = arguments.batch_size or recipe.batch_size
        ways = [
            (text, shuffle)
            for text in arguments.strategies.split(",")
            # exact SGD learns from everybody's samples in every step, wherever they are
            for shuffle in (["dealt"] if text == EXACT else arguments.shuffles.split(","))
        ]
        for (text, shuffle), seed in product(ways, map(int, arguments.seeds.split(","))):
            config = resolve(
                name,
                text,
                workers=arguments.workers,
                epochs=arguments.epochs,
                batch_size=max(1, size // arguments.workers) if arguments.divide_batch else size,
                seed=seed,
                data=data,
                device=arguments.device,
                shuffle=shuffle,
            )
            folder = scratch / f"run-{len(found)}"
            folder.mkdir()
            given: dict[str, Any] = {"config": config, "cluster": cluster, "folder": folder}
            found.append(FidelityTask(strategy=text, slow=arguments.slow, deadline_s=deadline_s, **given))
    return sorted(found, key=lambda task: task.strategy != EXACT)


COLUMNS = (
    *("recipe", "strategy", "workers", "epochs", "reaches (mean of seeds)", "spread", "against exact"),
    *("virtual s", "sent MB per step and worker", "apart", "wall s"),
)


def rows(runs: Sequence[FidelityRun]) -> list[list[str]]:
    """A row for each recipe, strategy and way to shuffle."""
    lines = []
    for kind in dict.fromkeys(run.kind for run in runs):
        recipe, strategy, shuffle, slow = kind
        own = [run for run in runs if run.kind == kind]
        exact = [run for run in runs if (run.recipe, run.strategy) == (recipe, EXACT)]
        values, exact_values = _values(own), _values(exact)
        scale = 100.0 if own[0].metric == "accuracy" else 1.0
        mean = statistics.mean(values) * scale if values else float("nan")
        spread = f"{min(values) * scale:.2f} to {max(values) * scale:.2f}" if values else "-"
        against = mean - statistics.mean(exact_values) * scale if exact_values else float("nan")
        name = strategy if shuffle == "dealt" else f"{strategy}, shuffle {shuffle}"
        name += f", host {slow}" if slow else ""
        cells = [recipe, name, str(own[0].workers), str(own[0].epochs)]
        cells += [f"{own[0].metric} {mean:.2f} ({len(values)})", spread, f"{against:+.2f}"]
        cells += [f"{statistics.mean(run.virtual_s for run in own):.4g}"]
        cells += [f"{own[0].sent_bytes_per_step / 1e6:.3f}", f"{own[0].distance:.2g}"]
        lines.append([*cells, f"{statistics.mean(run.wall_s for run in own):.0f}"])
    return lines


def _values(runs: Sequence[FidelityRun]) -> list[float]:
    return [run.value for run in runs if run.value is not None]


@dataclass(slots=True)
class FidelityStudy:
    """The runs so far, and the file they are saved in."""

    arguments: argparse.Namespace
    file: ResultFile
    parts: list[dict[str, Any]] = field(default_factory=list)
    """The provenance of the runs of earlier commands."""
    runs: list[FidelityRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    used: Utilisation = field(default_factory=Utilisation)
    began_s: float = field(default_factory=time.monotonic)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began_s

    def resume(self, file: Path) -> None:
        """Go on with what an earlier command has kept."""
        kept = json.loads(file.read_text())
        self.parts, self.runs = kept["parts"], [FidelityRun(**run) for run in kept["runs"]]

    def go(self, waiting: list[FidelityTask], jobs: int) -> None:
        """Train them all, some at once."""
        done = {run.key for run in self.runs}
        waiting = [task for task in waiting if task.key not in done]
        note(f"{len(waiting)} runs, {jobs} at once")
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            running: dict[Future[FidelityRun], FidelityTask] = {}
            told_s = time.monotonic()
            while waiting or running:
                while waiting and len(running) < jobs:
                    task = waiting.pop(0)
                    if time.monotonic() > task.deadline_s:
                        self.failures.append(f"{task}: no time left")
                    else:
                        running[pool.submit(train, task)] = task
                ended, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                for future in ended:
                    self._end(running.pop(future), future)
                if time.monotonic() - told_s > TELL_EVERY_S:
                    told_s = time.monotonic()
                    note(f"{self.wall_s:.0f} s: " + "; ".join(map(_how_far, running.values())))

    def _end(self, task: FidelityTask, future: Future[FidelityRun]) -> None:
        error = future.exception()
        if error is None:
            run = future.result()
            self.runs.append(run)
            note(f"{task}: {run.metric} {run.value}, {run.wall_s:.0f} s")
            self.keep()
        else:
            said = error.message if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"
            self.failures.append(f"{task}: {said}")
            note(f"failed: {self.failures[-1]}")

    def keep(self) -> None:
        """Save all runs, with the provenance of each command that made some."""
        part = {
            **provenance(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            **self.used.summary(),
            "wall_s": self.wall_s,
            "jobs": self.arguments.jobs,
            "bucket_mb": self.arguments.bucket_mb,
            "failures": self.failures,
        }
        result = {"parts": [*self.parts, part], "runs": [asdict(run) for run in self.runs]}
        self.file.save(result)


def _how_far(task: FidelityTask) -> str:
    records = [event.record for event in EventReader(task.folder).poll()]
    progress = next((r for r in reversed(records) if isinstance(r, Progress)), None)
    judged = next((r for r in reversed(records) if isinstance(r, Evaluated)), None)
    step = "starting" if progress is None else f"step {progress.step} of {progress.num_steps}"
    return f"{task}: {step}" + ("" if judged is None else f", {judged.metric} {judged.value:.4g}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder with the data of all recipes (docs/recipes.md)")
    parser.add_argument("--recipes", default="cifar-resnet20,mnist-cnn,ptb-lstm", help="comma-separated")
    parser.add_argument(
        "--strategies",
        default=",".join([*strategies.names(), *VARIANTS]),
        help="comma-separated, as all-reduce:overlap=none (all)",
    )
    parser.add_argument("--shuffles", default="dealt", help="comma-separated: dealt, own, ring (dealt)")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated (0,1,2)")
    parser.add_argument("--epochs", type=int, help="of every recipe (each its own)")
    parser.add_argument("--batch-size", type=int, help="of one worker (each recipe's own)")
    parser.add_argument("--divide-batch", action="store_true", help="keep the global batch of one worker")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, help="runs at once (6 on a GPU, else 1)")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--slow", default="", metavar="HOST=SPEED", help="a host that computes slower: 7=0.5")
    parser.add_argument("--latency-ms", type=float, default=0.4)
    parser.add_argument("--compute", type=float, default=0.2, help="seconds per step of a worker (0.2)")
    parser.add_argument("--bucket-mb", type=float, help="size of buckets; large ones are simulated faster")
    parser.add_argument("--limit", type=float, default=560, help="seconds after which runs are ended (560)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="an earlier result to go on with")
    parser.add_argument(
        "--quick", action="store_true", help="digits-cnn, 4 workers, 2 seeds, 4 epochs, on a CPU"
    )
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.recipes, chosen.workers, chosen.seeds = "digits-cnn", 4, "0,1"
        chosen.epochs, chosen.device = chosen.epochs or 4, "cpu"
    if chosen.jobs is None:
        chosen.jobs = 6 if chosen.device != "cpu" and torch.cuda.is_available() else 1
    return chosen


def main() -> None:
    """Run, print the table, keep the numbers."""
    arguments = parse()
    study = FidelityStudy(arguments, result_file("fidelity", trial=arguments.quick))
    if arguments.resume is not None:
        study.resume(arguments.resume)
    with tempfile.TemporaryDirectory() as scratch, study.used.watched():
        folder = Path(scratch)
        data = None if arguments.data is None else prepared(arguments.data, folder)
        try:
            waiting = tasks(arguments, data, folder, study.began_s + arguments.limit)
        except ThinwireError as error:
            sys.exit(f"error: {error}")
        study.go(waiting, arguments.jobs)
    print_head(*COLUMNS)
    for row in rows(study.runs):
        print_row(*row)
    busy = study.used.summary()["gpu_busy_percent"]
    print(f"\n{study.wall_s:.0f} s" + ("" if busy is None else f", GPU busy {busy:.0f} % of it"))
    for failure in study.failures:
        print(f"failed: {failure}")
    if study.file.path is not None:
        study.keep()  # once more, with the failures
        print(study.file.path)
    if study.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
