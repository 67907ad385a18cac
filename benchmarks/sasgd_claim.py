"""The claim of the SASGD paper, replayed: SASGD against Downpour and EAMSGD with 8 workers.

    python -m benchmarks.sasgd_claim                    digits-cnn, interval 8: 15 minutes on an idle core
    python -m benchmarks.sasgd_claim --minutes 5        in portions: the next command goes on
    python -m benchmarks.sasgd_claim --quick            two rates and one seed, to see it work

Cong, Bhardwaj and Feng (2017) report that SASGD beats Downpour and EAMSGD. Here all three train the same net
on the same data with SGD; learning rate and momentum of each are tuned over the same grid on one seed, by the
final accuracy, and compared on other seeds. EAMSGD is EASGD with momentum; the others may have it, too.
Training is real, on the virtual clock: 100 Mbit/s, 0.4 ms latency, 10 ms of compute per step that vary by
10 %, so that workers which wait for nobody gain from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.optim import SGD

from benchmarks.common import ROOT, note, parser_of, print_head, print_row, result_file
from thinwire.errors import NumericError
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.base import Recipe, Training
from thinwire.recipes.config import resolve
from thinwire.recipes.virtual import VirtualCluster, virtual_training

SYSTEMS = ("sasgd", "downpour", "easgd")
RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Low ones too: Downpour adds up what all workers have changed, and wants a rate as many times smaller."""
MOMENTA = (0.0, 0.9)
WORKERS, BATCH_SIZE = 8, 8
TARGET = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRun:
    """One training, before and after."""

    system: str
    interval: int
    rate: float
    momentum: float
    seed: int
    epochs: int
    value: float = 0.0
    """Final accuracy; 0 if the loss became infinite."""
    train_s: float = 0.0
    to_target_s: float | None = None
    """Virtual seconds to an accuracy of TARGET."""
    sent_bytes_per_step: float = 0.0

    @property
    def settings(self) -> tuple[str, int, float, float]:
        return (self.system, self.interval, self.rate, self.momentum)

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.settings, self.seed, self.epochs)


def with_sgd(rate: float, momentum: float) -> Recipe:
    """digits-cnn with SGD in the place of AdamW; the rate is the highest of the schedule."""
    base = registry.get("digits-cnn")

    def training() -> Training:
        def sgd(model: torch.nn.Module, plan: object) -> SGD:
            return SGD(model.parameters(), lr=rate, momentum=momentum)

        return replace(base.training(), optimizer=sgd)

    return replace(base, training=training)


def train(run: ClaimRun) -> ClaimRun:
    torch.set_num_threads(1)
    config = resolve(
        "digits-cnn",
        f"{run.system}:interval={run.interval}",
        workers=WORKERS,
        batch_size=BATCH_SIZE,
        epochs=run.epochs,
        seed=run.seed,
        device="cpu",
    )
    cluster = VirtualCluster(
        description=describe(hosts=WORKERS, rate="100mbit"), latency_s=0.0004, compute_s=0.01, jitter=0.1
    )
    try:
        with virtual_training(with_sgd(run.rate, run.momentum), config, cluster) as training:
            while not training.done:
                training.epoch()
            summary = training.result().summary
    except NumericError:
        return run
    reached = [each.train_s for each in training.evaluations if (each.value or 0.0) >= TARGET]
    return replace(
        run,
        value=summary.value or 0.0,
        train_s=summary.train_s,
        to_target_s=min(reached, default=None),
        sent_bytes_per_step=summary.sent_bytes_per_step,
    )


class Trainings:
    """Trains what is not in the file yet, until the time is up."""

    def __init__(self, file: Path, jobs: int, minutes: float) -> None:
        self._file, self._jobs = file, jobs
        self._deadline_s = time.monotonic() + 60 * minutes
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        done = [ClaimRun(**json.loads(line)) for line in lines]
        self._done = {run.key: run for run in done}

    def __call__(self, runs: Sequence[ClaimRun]) -> list[ClaimRun]:
        """All of them, trained; exits if there was no time for all."""
        missing = [run for run in runs if run.key not in self._done]
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn")) as pool:
            for first in range(0, len(missing), self._jobs):
                if time.monotonic() > self._deadline_s:
                    sys.exit(f"{len(missing) - first} trainings left: run the same command again")
                for run in pool.map(train, missing[first : first + self._jobs]):
                    note(f"{run.settings}, seed {run.seed}: {run.value:.4f}")
                    self._done[run.key] = run
                    with self._file.open("a") as lines:
                        lines.write(json.dumps(asdict(run)) + "\n")
        return [self._done[run.key] for run in runs]


def tuned(runs: Sequence[ClaimRun], system: str, interval: int) -> ClaimRun:
    """The settings with the best final accuracy; of equal ones, the one that was there first."""
    own = [run for run in runs if (run.system, run.interval) == (system, interval)]
    return max(own, key=lambda run: (run.value, -(run.to_target_s or float("inf"))))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--intervals", default="8", help="comma-separated (8)")
    parser.add_argument("--seeds", type=int, default=5, help="compared on so many; tuned on another (5)")
    parser.add_argument("--epochs", type=int, default=20, help="(20)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once (1)")
    parser.add_argument("--minutes", type=float, default=60, help="time after which none is begun (60)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "sasgd_claim.jsonl", help="what is done")
    parser.add_argument("--quick", action="store_true", help="not a result: saved below runs/")
    return parser.parse_args(arguments)


def main() -> None:
    """Tune, compare, print the table, keep the numbers."""
    arguments = parse()
    file = result_file("sasgd_claim", trial=arguments.quick)
    rates, seeds = (RATES[3:5], 1) if arguments.quick else (RATES, arguments.seeds)
    epochs = 2 if arguments.quick else arguments.epochs
    intervals = [int(interval) for interval in arguments.intervals.split(",")]
    given: dict[str, Any] = {"seed": 0, "epochs": epochs}
    grid = [
        ClaimRun(system=system, interval=interval, rate=rate, momentum=momentum, **given)
        for system, interval, rate, momentum in product(SYSTEMS, intervals, rates, MOMENTA)
    ]
    trained = Trainings(arguments.work, arguments.jobs, arguments.minutes)
    tuning = trained(grid)
    best = [tuned(tuning, system, interval) for interval, system in product(intervals, SYSTEMS)]
    runs = trained([replace(run, seed=seed) for run in best for seed in range(1, seeds + 1)])
    rows = [asdict(run) for run in runs]
    path = file.save({"config": vars(arguments), "tuning": [asdict(run) for run in tuning], "runs": rows})
    print_head(
        "interval",
        "system",
        "rate",
        "momentum",
        "accuracy, %",
        "spread",
        f"s to {TARGET:.0%}",
        "s",
        "kB per step",
    )
    for chosen in best:
        own = [run for run in runs if run.settings == chosen.settings]
        values, reached = (
            [100 * run.value for run in own],
            [run.to_target_s for run in own if run.to_target_s],
        )
        print_row(
            chosen.interval,
            "eamsgd" if chosen.system == "easgd" and chosen.momentum else chosen.system,
            chosen.rate,
            chosen.momentum,
            f"{statistics.mean(values):.2f}",
            f"{min(values):.2f} to {max(values):.2f}",
            f"{statistics.mean(reached):.2f} ({len(reached)} of {len(own)})" if reached else "never",
            f"{statistics.mean(run.train_s for run in own):.2f}",
            f"{statistics.mean(run.sent_bytes_per_step for run in own) / 1e3:.1f}",
        )
    note(f"saved {path}")


if __name__ == "__main__":
    main()
