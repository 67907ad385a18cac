"""The claim of the SASGD paper, replayed: SASGD against Downpour and EAMSGD with 8 workers.

    python -m benchmarks.sasgd_claim --data DIR --jobs 2               interval 8: 20 minutes on two cores
    python -m benchmarks.sasgd_claim --data DIR --minutes 5            in portions: the next command goes on
    python -m benchmarks.sasgd_claim --data DIR --systems easgd --work FILE      a part, beside others
    python -m benchmarks.sasgd_claim --data DIR --quick                one epoch, to see it work

Cong, Bhardwaj and Feng (2017) report that SASGD beats Downpour and EAMSGD. Here all three, and exact SGD,
train the same convolution net on the same part of CIFAR-10 with SGD; learning rate and momentum of each are
tuned over the same grid on one seed, by the final accuracy, and compared on other seeds. The search begins
with three rates beside each other, lower with momentum and for Downpour, and goes on with the neighbours of
the best until it has none that was not tried. EAMSGD is EASGD with momentum; the others may have it, too.
How far it pulls is tuned as well: 0.9 / P as its paper has it, or 0.3. Training is real, on the virtual
clock: 100 Mbit/s, 0.4 ms latency, 10 ms of compute per step that vary by 10 %, so that workers which wait
for nobody gain from it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.claim_recipe import NUM_IMAGES, with_sgd
from benchmarks.common import ROOT, note, parser_of, print_head, print_row, result_file
from thinwire.errors import NumericError
from thinwire.hosts.description import describe
from thinwire.recipes.config import resolve
from thinwire.recipes.virtual import VirtualCluster, virtual_training

EXACT = "all-reduce"
SYSTEMS = (EXACT, "sasgd", "downpour", "easgd")
RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Low ones too: Downpour adds up what all workers have changed, and wants a rate as many times smaller."""
FIRST = 0.1
"""Around this rate the search begins, without momentum."""
MOMENTA = (0.0, 0.9)
MORE = {("easgd", 0.9): ("", ":pull=0.3")}
"""Further settings of a system that are tuned, with the momentum they belong to."""
WORKERS, BATCH_SIZE = 8, 16
TARGET = 0.8
"""Of the final accuracy of exact SGD: the seconds to it are compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimRun:
    """One training, before and after."""

    system: str
    interval: int
    rate: float
    momentum: float
    seed: int
    epochs: int
    more: str = ""
    """Further settings, as they are written behind the interval."""
    values: list[float] = field(default_factory=list, hash=False)
    """Test accuracy after each epoch; they end where the loss became infinite."""
    seconds: list[float] = field(default_factory=list, hash=False)
    """Of the virtual clock, at the same moments."""
    sent_bytes_per_step: float = 0.0

    @property
    def line(self) -> tuple[str, int, float, str]:
        """All settings but the rate, which is searched for each of these."""
        return (self.system, self.interval, self.momentum, self.more)

    @property
    def settings(self) -> tuple[object, ...]:
        return (*self.line, self.rate)

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.settings, self.seed, self.epochs)

    @property
    def first(self) -> int:
        """The place in the grid of a rate whose steps add up to about as much as others' first rates do."""
        rate = FIRST * (1 - self.momentum) / (WORKERS if self.system == "downpour" else 1)
        return min(range(len(RATES)), key=lambda place: abs(math.log(RATES[place] / rate)))

    @property
    def value(self) -> float:
        """Final accuracy; 0 if training did not get there."""
        return self.values[-1] if len(self.values) == self.epochs else 0.0

    def reaches(self, accuracy: float) -> float | None:
        """Seconds to an accuracy."""
        pairs = zip(self.values, self.seconds, strict=True)
        return next((at_s for value, at_s in pairs if value >= accuracy), None)


def train(run: ClaimRun, data: Path, folder: Path, deadline_s: float) -> ClaimRun | None:
    """Train to the end; None if there is no time for that: what was done is saved in `folder`."""
    torch.set_num_threads(1)
    config = resolve(
        "cifar-resnet20",
        run.system if run.system == EXACT else f"{run.system}:interval={run.interval}{run.more}",
        workers=WORKERS,
        batch_size=BATCH_SIZE,
        epochs=run.epochs,
        seed=run.seed,
        data=data,
        device="cpu",
    )
    cluster = VirtualCluster(
        description=describe(hosts=WORKERS, rate="100mbit"), latency_s=0.0004, compute_s=0.01, jitter=0.1
    )
    file = folder / ("-".join(map(str, run.key)) + ".pt")
    sent_bytes_per_step = 0.0
    with virtual_training(with_sgd(run.rate, run.momentum), config, cluster) as training:
        if file.exists():
            training.load_state_dict(torch.load(file, weights_only=False))
        try:
            while not training.done:
                if time.monotonic() > deadline_s:
                    return None
                training.epoch()
                torch.save(training.state_dict(), file)
            sent_bytes_per_step = training.result().summary.sent_bytes_per_step
        except NumericError:
            note(f"{run.settings}, seed {run.seed}: not finite")
        curve = [(each.value or 0.0, each.train_s) for each in training.evaluations]
    file.unlink(missing_ok=True)
    values, seconds = [value for value, _ in curve], [at_s for _, at_s in curve]
    return replace(run, values=values, seconds=seconds, sent_bytes_per_step=sent_bytes_per_step)


class Trainings:
    """Trains what is not in the file yet, until the time is up."""

    def __init__(self, arguments: argparse.Namespace, file: Path) -> None:
        self._file, self._jobs, self._data = file, arguments.jobs, arguments.data
        self._deadline_s = time.monotonic() + 60 * arguments.minutes
        self._folder = file.with_suffix("")
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = file.read_text().splitlines() if file.exists() else []
        done = [ClaimRun(**json.loads(line)) for line in lines]
        self._done = {run.key: run for run in done}

    def __call__(self, runs: Sequence[ClaimRun]) -> list[ClaimRun]:
        """All of them, trained; exits if there was no time for all."""
        missing = [run for run in runs if run.key not in self._done]
        with ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn")) as pool:
            given = (self._data, self._folder, self._deadline_s)
            for future in as_completed([pool.submit(train, run, *given) for run in missing]):
                self._keep(future.result())
        left = sum(run.key not in self._done for run in runs)
        if left:
            sys.exit(f"{left} trainings left: run the same command again")
        return [self._done[run.key] for run in runs]

    def _keep(self, run: ClaimRun | None) -> None:
        if run is None:
            return
        note(f"{run.settings}, seed {run.seed}: {run.value:.4f}")
        self._done[run.key] = run
        with self._file.open("a") as lines:
            lines.write(json.dumps(asdict(run)) + "\n")

    def tune(self, first: Sequence[ClaimRun]) -> list[ClaimRun]:
        """Search the rates of each of these settings; gives all that was trained on this seed."""
        asked = {run: {run.first} | _beside(run.first) for run in first}
        while True:
            found = dict[ClaimRun, list[ClaimRun]]()
            runs = [replace(run, rate=RATES[at]) for run, places in asked.items() for at in sorted(places)]
            trained = iter(self(runs))
            for run, places in asked.items():
                found[run] = [next(trained) for _ in places]
            new = {run: _neighbours(found[run]) - asked[run] for run in asked}
            if not any(new.values()):
                lines = {(run.line, run.seed, run.epochs) for run in first}
                return [r for r in self._done.values() if (r.line, r.seed, r.epochs) in lines]
            asked = {run: asked[run] | new[run] for run in asked}


def _neighbours(runs: Sequence[ClaimRun]) -> set[int]:
    """The places in the grid beside the best of them."""
    return _beside(RATES.index(max(runs, key=lambda run: run.value).rate))


def _beside(at: int) -> set[int]:
    return {place for place in (at - 1, at + 1) if 0 <= place < len(RATES)}


def tuned(runs: Sequence[ClaimRun], system: str) -> ClaimRun:
    """The settings with the best final accuracy; of equal ones, the one that was there first."""
    return max((run for run in runs if run.system == system), key=lambda run: run.value)


def lines_of(systems: Sequence[str]) -> Iterator[tuple[str, float, str]]:
    """System, momentum and further settings of every line of the grid."""
    for system, momentum in product(systems, MOMENTA):
        for more in MORE.get((system, momentum), ("",)):
            yield system, momentum, more


def print_tuning(runs: Sequence[ClaimRun]) -> None:
    """Final accuracy of every cell of the grid that was tried."""
    print("\nFinal accuracy on the seed of the tuning, %:\n")
    print_head("system", "momentum", *map(str, RATES))
    for line in lines_of(SYSTEMS):
        own = {r.rate: f"{100 * r.value:.1f}" for r in runs if (r.system, r.momentum, r.more) == line}
        system, momentum, more = line
        print_row(f"{system}{more}", momentum, *(own.get(rate, "") for rate in RATES))


def print_comparison(best: Sequence[ClaimRun], runs: Sequence[ClaimRun]) -> None:
    exact = statistics.mean(run.value for run in runs if run.system == EXACT)
    print(f"\nOn other seeds; the last but one column: seconds to {TARGET:.0%} of exact SGD's accuracy\n")
    print_head("system", "rate", "momentum", "accuracy, %", "spread", "s", "s to it", "kB per step")
    for chosen in best:
        own = [run for run in runs if run.settings == chosen.settings]
        values = [100 * run.value for run in own]
        reached = [at_s for run in own if (at_s := run.reaches(TARGET * exact)) is not None]
        print_row(
            "eamsgd" if chosen.system == "easgd" and chosen.momentum else chosen.system,
            chosen.rate,
            chosen.momentum,
            f"{statistics.mean(values):.2f}",
            f"{min(values):.2f} to {max(values):.2f}",
            f"{statistics.mean(run.seconds[-1] for run in own if run.seconds):.1f}",
            f"{statistics.mean(reached):.1f} ({len(reached)} of {len(own)})" if reached else "never",
            f"{statistics.mean(run.sent_bytes_per_step for run in own) / 1e3:.1f}",
        )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--interval", type=int, default=8, help="of all but exact SGD (8)")
    parser.add_argument("--seeds", type=int, default=3, help="compared on so many; tuned on another (3)")
    parser.add_argument("--epochs", type=int, default=8, help="(8)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="without all of them no result is kept")
    parser.add_argument("--tune", default="", help="only search the rates of one line: 0.9:pull=0.3")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at once (1)")
    parser.add_argument("--minutes", type=float, default=60, help="time after which none is begun (60)")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "sasgd_claim.jsonl", help="what is done")
    parser.add_argument("--quick", action="store_true", help="not a result: saved below runs/")
    return parser.parse_args(arguments)


def main() -> None:
    """Tune, compare, print the tables, keep the numbers."""
    arguments = parse()
    file = result_file("sasgd_claim", trial=arguments.quick)
    epochs, seeds = (1, 1) if arguments.quick else (arguments.epochs, arguments.seeds)
    trained = Trainings(arguments, arguments.work)
    given: dict[str, Any] = {"rate": 0.0, "seed": 0, "epochs": epochs}
    systems = [system for system in SYSTEMS if system in arguments.systems.split(",")]
    intervals = {system: 1 if system == EXACT else arguments.interval for system in SYSTEMS}
    tuning = trained.tune(
        [
            ClaimRun(system=system, interval=intervals[system], momentum=momentum, more=more, **given)
            for system, momentum, more in lines_of(systems)
            if arguments.tune in ("", f"{momentum:g}{more}")
        ]
    )
    if arguments.tune:
        note(f"{arguments.systems}, {arguments.tune}: tuned")
        return
    best = [tuned(tuning, system) for system in systems]
    later = [replace(run, values=[], seconds=[], seed=seed) for run in best for seed in range(1, seeds + 1)]
    runs = trained(later)
    if systems != list(SYSTEMS):
        note(
            f"{arguments.systems}: all trained; put the lines of all files into one, and leave --systems out"
        )
        return
    given = {name: value for name, value in vars(arguments).items() if name not in ("data", "work")}
    config = {**given, "num_images": NUM_IMAGES, "workers": WORKERS, "batch_size": BATCH_SIZE}
    path = file.save({"config": config}, tuning=list(map(asdict, tuning)), runs=list(map(asdict, runs)))
    print(f"## benchmarks/sasgd_claim.py\n\nInterval {arguments.interval}, {WORKERS} workers")
    print_tuning(tuning)
    print_comparison(best, runs)
    note(f"saved {path}")


if __name__ == "__main__":
    main()
