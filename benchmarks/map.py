"""The map, accuracy against seconds: whole trainings with every strategy, and their times at three rates.

    python -m benchmarks.map --data DIR --minutes 9                     everything, in portions
    python -m benchmarks.map --data DIR --recipes cifar-resnet20 --workers 8 --strategies all-reduce,trickle
    python -m benchmarks.map --clock                                    times of what is trained; no training
    python -m benchmarks.map --list                                     what would be trained
    python -m benchmarks.map --quick                                    digits-cnn on a CPU, to see it work
    python -m benchmarks.map_page                                       figures and tables from the results

Training is real, with the recipe's own optimizer and schedule; time is that of a virtual network. A training
is the same at every rate unless its strategy measures the network or waits for nobody: then it is trained
once for each rate, and otherwise its times at all rates are played from sizes (`--clock`; done for what is
ready at the end of every command, too).

`--jobs` trainings go on at once, each in a process. Each is saved every 45 seconds and when `--minutes` are
over, in `--work` (runs/map), and the next command goes on from there with the same bits. A training that is
done is a small file in `--work` at once; all of them are collected in `--results` (benchmarks/results), one
file for each recipe, map-RECIPE.json. What these files have is not trained again. On a GPU, start
`nvidia-cuda-mps-control -d` before, so that processes share it instead of taking turns.

A strategy may have {third}, {half} and {warmup} in it: a third of the steps, half of the workers, and an
eighth of the steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, ROOT, note, parser_of
from benchmarks.map_run import RATES, MapRun, MapTask, clocked, feels_the_rate, key_of, train, write_whole
from benchmarks.recipes import prepared
from thinwire.errors import DataError, ThinwireError
from thinwire.recipes import registry
from thinwire.recipes.config import resolve
from thinwire.recipes.setup import RunSetup

SPARSE = "density=0.01:warmup_steps={warmup}"
STRATEGIES = (
    "all-reduce",
    "trickle",
    "diloco:interval=32:fragments=8:delay=1",
    "sasgd:interval=8",
    "gossip-grad",
    "gossip-grad:share=0.1",
    f"gtopk:{SPARSE}",
    "sasgd:interval=auto",
    "sasgd:interval=32",
    "diloco",
    "diloco:interval=32:fragments=8:delay=1:payload=int4",
    "trickle:density=0.03",
    "trickle:interval=32",
    "partial-averaging",
    "post-local:exact_steps={third}",
    "hierarchical-averaging:groups={half}",
    f"topk:{SPARSE}",
    f"oktopk:{SPARSE}",
    "gossip-grad:payload=int8",
    "gossip-grad:share=auto",
    "stochastic-gradient-push",
    "gtopk:warmup_steps={warmup}",
    "downpour:interval=8",
    "easgd",
    "silent",
)
"""In the order of how much the map would miss them."""
CELLS = {"cifar-resnet20": (8, 4, 16), "ptb-lstm": (4,), "text-transformer": (4,)}
LEAST_S = 40.0
"""Nothing is begun that has less time left than this."""


def tasks(arguments: argparse.Namespace, data: Path | None) -> Iterator[MapTask]:
    """All trainings; recipes without data are named and left out."""
    cells = []
    for name in arguments.recipes.split(","):
        try:
            locate = registry.get(name).locate
            if locate is not None:
                locate(None if name == "digits-cnn" else data)
        except DataError as error:
            note(f"left out: {name}: {error.message}")
            continue
        counts = map(int, arguments.workers.split(",")) if arguments.workers else CELLS.get(name, (4, 8))
        cells += [(name, workers) for workers in counts]
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for seed, text, (name, workers) in product(seeds, arguments.strategies.split(","), cells):
        epochs = arguments.epochs or registry.get(name).epochs
        own = data if name != "digits-cnn" else None
        given: dict[str, Any] = {
            "recipe": name,
            "workers": workers,
            "seed": seed,
            "epochs": epochs,
            "data": own,
        }
        strategy = fitted(text, MapTask(strategy="silent", rate=None, **given))
        for rate in RATES if feels_the_rate(strategy) else (None,):
            yield MapTask(strategy=strategy, rate=rate, device=arguments.device, **given)


def fitted(text: str, task: MapTask) -> str:
    """The strategy with the words in braces replaced."""
    clip_norm = registry.get(task.recipe).training().clip_norm
    # selected gradients cannot be clipped after they were added up: each worker clips its own
    if clip_norm is not None and "topk" in text:
        text += f":clip_norm={clip_norm}:keep_rate=true"
    if "{" not in text:
        return text
    setup = replace(_setup(task.recipe, task.data), config=task.config)
    num_steps = setup.plan(task.workers).num_steps
    return text.format(third=num_steps // 3, half=max(1, task.workers // 2), warmup=num_steps // 8)


@functools.cache
def _setup(recipe: str, data: Path | None) -> RunSetup:
    return RunSetup.load(registry.get(recipe), resolve(recipe, "silent", workers=1, data=data, device="cpu"))


def data_folder(given: Path, work: Path) -> Path:
    """The data, unpacked by an earlier command or now."""
    unpacked = work / "data"
    if (unpacked / "cifar10.npz").exists():
        return unpacked
    shutil.rmtree(unpacked, ignore_errors=True)  # unpacking was interrupted
    return prepared(given, work)


class MapStudy:
    """All runs that are there, in one file for each recipe."""

    def __init__(self, work: Path, results: Path) -> None:
        self.work, self.results = work, results
        work.mkdir(parents=True, exist_ok=True)
        results.mkdir(parents=True, exist_ok=True)
        self.runs: dict[tuple[object, ...], MapRun] = {}
        for folder in dict.fromkeys((RESULTS, results)):
            for file in sorted(folder.glob("map-*.json")):
                self._add(*json.loads(file.read_text())["runs"])
        for file in sorted(work.glob("*.json")):
            self._add(json.loads(file.read_text()))
        self.failures: list[str] = []

    def _add(self, *rows: dict[str, Any]) -> None:
        for row in rows:
            run = MapRun(**row)
            known = self.runs.get(run.key)
            if known is None or (run.whole, len(run.seconds)) >= (known.whole, len(known.seconds)):
                self.runs[run.key] = run

    def is_done(self, task: MapTask) -> bool:
        run = self.runs.get(key_of(task))
        return run is not None and run.whole

    def train(self, waiting: list[MapTask], jobs: int, deadline_s: float) -> None:
        """Train what is missing, some at once, until the deadline."""
        waiting = [task for task in waiting if not self.is_done(task)]
        note(f"{len(waiting)} trainings left, {jobs} at once")
        # those that were begun come first: their files are large
        waiting.sort(key=lambda task: not (self.work / f"{task.name}.pt").exists())
        calls = {task.name: partial(train, task, self.work, deadline_s) for task in waiting}
        left = self._go(calls, jobs, deadline_s)
        note(f"{left} trainings were not begun")

    def clock(self, jobs: int, deadline_s: float) -> None:
        """Play the times that are missing, until the deadline."""
        missing = [run for run in self.runs.values() if run.rate is None and len(run.seconds) < len(RATES)]
        calls = {
            f"clock of {run.recipe}, {run.strategy}, {run.workers}, seed {run.seed}": partial(clocked, run)
            for run in missing
        }
        if left := self._go(calls, jobs, deadline_s):
            note(f"the times of {left} trainings are missing: --clock plays them")

    def _go(self, calls: Mapping[str, Callable[[], MapRun | None]], jobs: int, deadline_s: float) -> int:
        """Make calls, some at once, and keep what they give; returns how many there was no time for."""
        waiting = list(calls.items())
        running: dict[Future[MapRun | None], str] = {}
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            while waiting or running:
                while waiting and len(running) < jobs and time.monotonic() < deadline_s - LEAST_S:
                    name, call = waiting.pop(0)
                    running[pool.submit(call)] = name
                if not running:
                    break
                ended, _ = wait(running, timeout=5, return_when=FIRST_COMPLETED)
                for future in ended:
                    self._end(running.pop(future), future)
        return len(waiting)

    def _end(self, name: str, future: Future[MapRun | None]) -> None:
        error = future.exception()
        if error is not None:
            said = error.message if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"
            self.failures.append(f"{name}: {said}")
            note(f"failed: {self.failures[-1]}")
            return
        run = future.result()
        if run is None:
            note(f"{name}: to be continued")
            return
        self.runs[run.key] = run
        note(f"{name}: {run.metric} {run.value}, {run.wall_s:.0f} s")
        self.keep(run.recipe)

    def keep(self, recipe: str) -> None:
        """Write the file of one recipe, a line for each run."""
        runs = sorted(
            (run for run in self.runs.values() if run.recipe == recipe), key=lambda run: str(run.key)
        )
        lines = ",\n ".join(json.dumps(asdict(run)) for run in runs)
        text = f'{{"recipe": "{recipe}", "runs": [\n {lines}\n]}}\n'
        write_whole(self.results / f"map-{recipe}.json", lambda part: part.write_text(text))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    data = os.environ.get("THINWIRE_DATA")
    parser.add_argument("--data", type=Path, default=data, help="folder with the data (or $THINWIRE_DATA)")
    parser.add_argument("--recipes", default=",".join(CELLS), help="comma-separated")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated (all)")
    parser.add_argument("--workers", default="", help="comma-separated (4, 8, 16 for cifar-resnet20, else 4)")
    parser.add_argument("--seeds", default="0", help="comma-separated (0)")
    parser.add_argument("--epochs", type=int, help="of every recipe (each its own)")
    parser.add_argument("--jobs", type=int, help="trainings at once (cores - 2 with a GPU, else 1)")
    parser.add_argument("--minutes", type=float, default=9.0, help="time after which trainings are saved (9)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "map", help="folder of what is begun")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of what is done")
    parser.add_argument("--clock", action="store_true", help="only play the times of what is trained")
    parser.add_argument("--list", action="store_true", help="only say what would be trained")
    parser.add_argument("--quick", action="store_true", help="digits-cnn, 4 workers, 3 epochs, on a CPU")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.recipes, chosen.workers, chosen.device = "digits-cnn", "4", "cpu"
        chosen.epochs, chosen.results = chosen.epochs or 3, chosen.work / "quick"
    if chosen.jobs is None:
        on_gpu = chosen.device != "cpu" and torch.cuda.is_available()
        chosen.jobs = max(1, (os.cpu_count() or 3) - 2) if on_gpu else 1
    return chosen


def main() -> None:
    """Train, play the clock, say what is there."""
    arguments = parse()
    deadline_s = time.monotonic() + 60 * arguments.minutes
    study = MapStudy(arguments.work, arguments.results)
    if not arguments.clock:
        try:
            data = None if arguments.data is None else data_folder(arguments.data, arguments.work)
            waiting = list(tasks(arguments, data))
        except ThinwireError as error:
            sys.exit(f"error: {error}")
        if arguments.list:
            for task in waiting:
                print(f"{'done' if study.is_done(task) else 'missing'}  {task.name}")
            return
        study.train(waiting, arguments.jobs, deadline_s)
    study.clock(arguments.jobs, deadline_s)
    print(f"{len(study.runs)} runs in {arguments.results}")
    for failure in study.failures:
        print(f"failed: {failure}")
    if study.failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
