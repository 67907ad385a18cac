"""Trains recipes with one and several workers and tabulates what they reach and how long they take.

    python -m benchmarks.recipes --data DIR [--recipes mnist-cnn,ptb-lstm] [--workers 1,2] [--epochs N]

DIR holds the data of all recipes asked for (docs/recipes.md); those whose data is not there are left out and
named. Each run trains as `thinwire train` does. The table goes to stdout, progress to stderr, all results to
benchmarks/results/ after every run, so that those before a time limit are kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from benchmarks.common import ROOT, note, parser_of, print_head, print_row, result_file
from thinwire.errors import DataError, ThinwireError
from thinwire.event_log import read_events
from thinwire.events import Evaluated, Summary, plain
from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig, resolve
from thinwire.recipes.follow import run_local


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRecipe:
    """One finished training."""

    config: RunConfig
    summary: Summary
    wall_s: float
    curve: list[tuple[int, float | None]]
    """The metric on the test data after each epoch."""

    def cells(self) -> list[object]:
        """The cells of its row in the table."""
        result = self.summary
        value, target = _shown(result.metric, result.value), _shown(result.metric, result.target)
        cells: list[object] = [result.recipe, result.workers, self.config.batch_size]
        cells += [result.epochs, result.steps]
        cells += [f"{result.metric} {value}", target, "yes" if result.reached else "no"]
        cells += [f"{result.train_s:.0f}", f"{self.wall_s:.0f}"]
        return [*cells, f"{result.sent_bytes_per_step / 1e6:.2f}", f"{100 * result.exposed_share:.0f} %"]


COLUMNS = (
    *("recipe", "workers", "batch per worker", "epochs", "steps", "reaches", "target", "reached", "train s"),
    *("wall s", "sent MB per step and worker", "exposed"),
)


def _shown(metric: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{100 * value:.2f} %" if metric == "accuracy" else f"{value:.1f}"


def train(config: RunConfig, folder: Path, limit_s: float) -> TrainedRecipe | str:
    """Train on workers of this machine; return the reason if that fails or takes too long."""
    folder.mkdir()
    try:
        run = run_local(folder, config, limit_s=max(limit_s, 1))
    except ThinwireError as error:
        return error.message
    evaluated = [event.record for event in read_events(folder) if isinstance(event.record, Evaluated)]
    curve = [(record.epoch, record.value) for record in evaluated]
    return TrainedRecipe(config=config, summary=run.summary, wall_s=run.wall_s, curve=curve)


def prepared(data: Path, scratch: Path) -> Path:
    """`data`, or a folder with links to it and the CIFAR-10 arrays unpacked from its cifar10_dct.npz."""
    packed, decoder = data / "cifar10_dct.npz", data / "cifar10.py"
    if not (packed.exists() and decoder.exists()) or (data / "cifar10.npz").exists():
        return data
    folder = scratch / "data"
    folder.mkdir()
    for path in data.iterdir():
        (folder / path.name).symlink_to(path.absolute())
    subprocess.run([sys.executable, str(decoder), str(packed), str(folder / "cifar10.npz")], check=True)
    return folder


def chosen(arguments: argparse.Namespace, data: Path) -> list[RunConfig]:
    """The configuration of every run; recipes without data are left out."""
    found: list[RunConfig] = []
    for name, workers in product(arguments.recipes.split(","), map(int, arguments.workers.split(","))):
        size = arguments.batch_size or registry.get(name).batch_size
        try:
            config = resolve(
                name,
                arguments.strategy,
                workers=workers,
                epochs=arguments.epochs,
                batch_size=max(1, size // workers) if arguments.divide_batch else size,
                data=data,
                seed=arguments.seed,
                device=arguments.device,
            )
        except DataError as error:
            note(f"left out: {name}: {error.message}")
            continue
        found.append(config)
    return found


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipes", default=",".join(registry.names()), help="comma-separated (all)")
    parser.add_argument("--workers", default="1,2", help="comma-separated numbers of workers (1,2)")
    parser.add_argument("--epochs", type=int, help="of every recipe (each its own)")
    parser.add_argument("--batch-size", type=int, help="of one worker (each recipe's own)")
    parser.add_argument("--divide-batch", action="store_true", help="keep the global batch of one worker")
    parser.add_argument("--strategy", default="all-reduce")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=520, help="seconds after which to stop (520)")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    deadline_s = time.monotonic() + arguments.limit
    file, runs, failures = result_file("recipes"), list[TrainedRecipe](), list[str]()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    config = {key: str(value) for key, value in vars(arguments).items()}
    with tempfile.TemporaryDirectory() as scratch:
        data = prepared(arguments.data, Path(scratch))
        for number, chosen_config in enumerate(chosen(arguments, data)):
            what = f"{chosen_config.recipe}, {chosen_config.workers} workers"
            note(what)
            result = train(chosen_config, Path(scratch) / f"run-{number}", deadline_s - time.monotonic())
            if isinstance(result, str):
                failures.append(f"{what}: {result}")
            else:
                runs.append(result)
            saved = [{**asdict(r), "summary": plain(r.summary)} for r in runs]
            file.save({"gpu": gpu, "config": config, "runs": saved, "failures": failures})
    print_head(*COLUMNS)
    for run in runs:
        print_row(*run.cells())
    for failure in failures:
        print(f"\nfailed: {failure}")
    print(f"\n{file.path.relative_to(ROOT) if file.path else 'nothing was run'}")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    # Workers inherit this environment, and must import the same code.
    os.environ["PYTHONPATH"] = os.pathsep.join([f"{ROOT}/src", os.environ.get("PYTHONPATH", "")])
    main()
