"""What does a strategy cost in accuracy? Exact SGD against every lossy strategy, on the virtual clock.

    python -m benchmarks.fidelity --data DIR --recipes cifar-resnet20,mnist-cnn,ptb-lstm --workers 8 --seeds 3
    python -m benchmarks.fidelity --quick      digits-cnn on a CPU, about a minute; shows that it works

Every strategy gets the same recipe, epochs, batches, schedule and seeds; only what travels differs.
`all-reduce` is exact SGD, `silent` is what workers reach that never talk. Runs are independent of each other,
so several go on at once (`--jobs`), each with its replicas batched: that keeps a GPU busy. The table goes to
stdout, progress to stderr, everything measured to benchmarks/results/ after every run, so that what was done
before the limit is kept.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import RESULTS, provenance, save
from benchmarks.recipes import prepared
from thinwire.bench.systems import EXACT, named
from thinwire.errors import DataError
from thinwire.events import Evaluated, read_events
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.config import Choices, RunConfig, resolve
from thinwire.recipes.virtual import Cluster, simulate
from thinwire.strategies import registry as strategies

VARIANTS = (
    "gossip-grad:share=0.1",
    "gossip-grad:payload=int8",
    "gossip-grad:asynchronous=true",
    "gtopk:warmup_steps=200",
    "oktopk:warmup_steps=200",
)
"""Settings that may cost accuracy, beside those that strategies come with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training with one seed."""

    recipe: str
    strategy: str
    """With the settings that were given."""
    workers: int
    batch_size: int
    epochs: int
    seed: int
    metric: str
    value: float | None
    loss: float | None
    curve: list[tuple[int, float, float | None, float | None]]
    """Epoch, virtual seconds, metric, test loss."""
    steps: int
    virtual_s: float
    sent_bytes_per_step: float
    distance: float
    batched: bool
    wall_s: float


def one(strategy: str, config: RunConfig, cluster: Cluster) -> Run:
    """Train one of them, in a process of its own."""
    torch.set_num_threads(1)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        simulated = simulate(registry.get(config.recipe), config, cluster, folder)
        evaluated = [event.record for event in read_events(folder) if isinstance(event.record, Evaluated)]
    summary = simulated.summary
    return Run(
        recipe=config.recipe,
        strategy=strategy,
        workers=config.workers,
        batch_size=config.batch_size,
        epochs=config.epochs,
        seed=config.seed,
        metric=summary.metric,
        value=summary.value,
        loss=summary.loss,
        curve=[(e.epoch, e.train_s, e.value, e.loss) for e in evaluated],
        steps=summary.steps,
        virtual_s=summary.train_s,
        sent_bytes_per_step=summary.sent_bytes_per_step,
        distance=simulated.distance,
        batched=simulated.batched,
        wall_s=time.monotonic() - began_s,
    )


def configs(arguments: argparse.Namespace, data: Path | None) -> list[tuple[str, RunConfig]]:
    """Exact SGD of all recipes and seeds first; recipes without data are named and left out."""
    found: list[tuple[str, RunConfig]] = []
    for name in arguments.recipes.split(","):
        recipe = registry.get(name)
        size = arguments.batch_size or recipe.batch_size
        for system in arguments.strategies.split(","):
            strategy, settings = named(system)
            for seed in range(arguments.seeds):
                choices = Choices(
                    strategy=strategy,
                    settings=settings,
                    workers=arguments.workers,
                    epochs=arguments.epochs,
                    batch_size=max(1, size // arguments.workers) if arguments.divide_batch else size,
                    seed=seed,
                    data=data,
                    device=arguments.device,
                )
                try:
                    found.append((system, resolve(name, recipe, choices)))
                except DataError as error:
                    _note(f"left out: {name}: {error.message}")
                    break
    return sorted(found, key=lambda each: each[0] != EXACT)


@dataclass(slots=True)
class Utilisation:
    """How busy the GPU was, asked twice a second; None where nobody can say."""

    busy: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Ask in here."""
        command = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        try:
            asking = subprocess.Popen([*command, "-lms", "500"], stdout=subprocess.PIPE, text=True)
        except OSError:
            yield
            return
        reader = threading.Thread(target=self._read, args=(asking,), daemon=True)
        reader.start()
        try:
            yield
        finally:
            asking.terminate()
            asking.wait()
            reader.join()

    def _read(self, asking: subprocess.Popen[str]) -> None:
        assert asking.stdout is not None
        for line in asking.stdout:
            busy, _, memory = line.partition(",")
            try:
                self.busy.append(float(busy))
                self.memory_mb.append(float(memory))
            except ValueError:
                continue  # "[N/A]" from a GPU that does not tell

    def summary(self) -> dict[str, float | None]:
        """Mean share of time in which a kernel ran, and the most memory used."""
        return {
            "gpu_busy_percent": statistics.mean(self.busy) if self.busy else None,
            "gpu_memory_mb": max(self.memory_mb, default=None),
        }


HEAD = (
    "| recipe | strategy | workers | epochs | reaches (mean of seeds) | spread | against exact | virtual s "
    "| sent MB per step and worker | apart | wall s |\n|" + " --- |" * 11
)


def rows(runs: Sequence[Run]) -> list[str]:
    """A line for each recipe and strategy."""
    lines = []
    for recipe, strategy in dict.fromkeys((run.recipe, run.strategy) for run in runs):
        own = [run for run in runs if (run.recipe, run.strategy) == (recipe, strategy)]
        exact = [run for run in runs if (run.recipe, run.strategy) == (recipe, EXACT)]
        values, exact_values = _values(own), _values(exact)
        scale = 100.0 if own[0].metric == "accuracy" else 1.0
        mean = statistics.mean(values) * scale if values else float("nan")
        spread = f"{min(values) * scale:.2f} to {max(values) * scale:.2f}" if values else "-"
        against = mean - statistics.mean(exact_values) * scale if exact_values else float("nan")
        cells = [recipe, strategy, str(own[0].workers), str(own[0].epochs)]
        cells += [f"{own[0].metric} {mean:.2f} ({len(values)})", spread, f"{against:+.2f}"]
        cells += [f"{statistics.mean(run.virtual_s for run in own):.4g}"]
        cells += [f"{own[0].sent_bytes_per_step / 1e6:.3f}", f"{own[0].distance:.2g}"]
        cells += [f"{statistics.mean(run.wall_s for run in own):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _values(runs: Sequence[Run]) -> list[float]:
    return [run.value for run in runs if run.value is not None]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", type=Path, help="folder with the data of all recipes (docs/recipes.md)")
    parser.add_argument("--recipes", default="cifar-resnet20,mnist-cnn,ptb-lstm", help="comma-separated")
    parser.add_argument(
        "--strategies",
        default=",".join([*strategies.names(), *VARIANTS]),
        help="comma-separated, as `thinwire bench` names systems (all): gossip-grad:share=0.1",
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    parser.add_argument("--epochs", type=int, help="of every recipe (each its own)")
    parser.add_argument("--batch-size", type=int, help="of one worker (each recipe's own)")
    parser.add_argument("--divide-batch", action="store_true", help="keep the global batch of one worker")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--jobs", type=int, help="runs at once (6 on a GPU, else 1)")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--slow", action="append", metavar="HOST=SPEED", help="a host that computes slower")
    parser.add_argument("--latency-ms", type=float, default=0.4)
    parser.add_argument("--compute", type=float, default=0.2, help="seconds per step of a worker (0.2)")
    parser.add_argument(
        "--limit", type=float, default=560, help="seconds after which nothing new starts (560)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="digits-cnn, 4 workers, 2 seeds, 4 epochs, on a CPU"
    )
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.recipes, chosen.workers, chosen.seeds = "digits-cnn", 4, 2
        chosen.epochs, chosen.device = chosen.epochs or 4, "cpu"
    if chosen.jobs is None:
        chosen.jobs = 6 if chosen.device != "cpu" and torch.cuda.is_available() else 1
    return chosen


def main() -> None:
    """Run, print the table, keep the numbers."""
    arguments = parse()
    began_s = time.monotonic()
    runs, failures, used = list[Run](), list[str](), Utilisation()
    path: Path | None = None
    with tempfile.TemporaryDirectory() as scratch, used.watched():
        data = None if arguments.data is None else prepared(arguments.data, Path(scratch))
        waiting = configs(arguments, data)
        cluster = Cluster(
            description=describe(hosts=arguments.workers, rate=arguments.rate, slow=arguments.slow or []),
            latency_s=arguments.latency_ms / 1e3,
            compute_s=arguments.compute,
        )
        _note(f"{len(waiting)} runs, {arguments.jobs} at once")
        with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn")) as pool:
            running: dict[Future[Run], str] = {}
            while waiting or running:
                late = time.monotonic() - began_s > arguments.limit
                while waiting and len(running) < arguments.jobs:
                    strategy, config = waiting.pop(0)
                    name = f"{config.recipe}, {strategy}, seed {config.seed}"
                    if late:
                        failures.append(f"{name}: no time left")
                    else:
                        running[pool.submit(one, strategy, config, cluster)] = name
                ended, _ = wait(running, timeout=5, return_when=FIRST_COMPLETED)
                for future in ended:
                    name = running.pop(future)
                    error = future.exception()
                    if error is not None:
                        failures.append(f"{name}: {type(error).__name__}: {error}")
                        _note(f"failed: {failures[-1]}")
                        continue
                    runs.append(future.result())
                    _note(f"{name}: {runs[-1].value}, {runs[-1].wall_s:.0f} s")
                    result = report(arguments, runs, failures, used, time.monotonic() - began_s)
                    if path is not None:
                        path.unlink()
                    path = save("fidelity", result, trial=arguments.quick)
    print("\n".join([HEAD, *rows(runs)]))
    busy = used.summary()["gpu_busy_percent"]
    print(
        f"\n{time.monotonic() - began_s:.0f} s" + ("" if busy is None else f", GPU busy {busy:.0f} % of it")
    )
    for failure in failures:
        print(f"failed: {failure}")
    if path is not None:
        print(path.relative_to(RESULTS.parents[1]))
    if failures:
        sys.exit(1)


def report(
    arguments: argparse.Namespace, runs: list[Run], failures: list[str], used: Utilisation, wall_s: float
) -> dict[str, Any]:
    """All there is to know, as JSON."""
    return {
        **provenance(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **used.summary(),
        "config": {key: str(value) for key, value in vars(arguments).items()},
        "wall_s": wall_s,
        "failures": failures,
        "runs": [asdict(run) for run in runs],
    }


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
