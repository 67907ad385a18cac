"""Trains recipes with one and several workers and tabulates what they reach and how long they take.

    python -m benchmarks.recipes --data DIR [--recipes mnist-cnn,ptb-lstm] [--workers 1,2] [--epochs N]

DIR holds the data of all recipes asked for (docs/recipes.md); those whose data is not there are left out and
named. Each run is what `thinwire train` does: worker processes, events, a run folder. The table goes to
stdout, progress to stderr, everything that was measured to benchmarks/results/ after every run, so that
what was done before a time limit is kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import RESULTS, provenance, save
from thinwire.errors import DataError, ThinwireError
from thinwire.events import Evaluated, EventReader, Failed, Progress, Summary, plain
from thinwire.recipes import registry
from thinwire.recipes.config import Choices, RunConfig, resolve, write_config
from thinwire.recipes.launch import LocalWorkers, tail

EVERY_S = 20.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training that came to its end."""

    config: RunConfig
    summary: Summary
    wall_s: float
    curve: list[tuple[int, float | None]]
    """The metric on the test data after each epoch."""

    def row(self) -> str:
        """A line of the table."""
        result = self.summary
        value, target = _shown(result.metric, result.value), _shown(result.metric, result.target)
        reached = "yes" if result.reached else "no"
        cells = [result.recipe, result.workers, self.config.batch_size, result.epochs, result.steps]
        cells += [f"{result.metric} {value}", target, reached, f"{result.train_s:.0f}", f"{self.wall_s:.0f}"]
        cells += [f"{result.sent_bytes_per_step / 1e6:.2f}", f"{100 * result.exposed_share:.0f} %"]
        return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEAD = (
    "| recipe | workers | batch per worker | epochs | steps | reaches | target | reached | train s | wall s "
    "| sent MB per step and worker | exposed |\n|" + " --- |" * 12
)


def _shown(metric: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{100 * value:.2f} %" if metric == "accuracy" else f"{value:.1f}"


def run(config: RunConfig, folder: Path, deadline: float) -> Run:
    """Train on workers of this machine; ThinwireError if they fail or the time is up."""
    began = told = time.monotonic()
    write_config(folder, config)
    reader, curve = EventReader(folder), list[tuple[int, float | None]]()
    latest: Progress | None = None
    failed: Failed | None = None
    summary: Summary | None = None
    with LocalWorkers(folder, config.workers) as workers:
        ended = False
        while not ended:
            ended = workers.poll() is not None
            for event in reader.poll():
                match event.record:
                    case Progress() as latest:
                        pass
                    case Evaluated() as evaluated:
                        curve.append((evaluated.epoch, evaluated.value))
                    case Failed() as failed:
                        ended = True
                    case Summary() as summary:
                        pass
                    case _:
                        pass
            if time.monotonic() > deadline:
                raise ThinwireError("the time is up", hint="choose fewer recipes or epochs, or raise --limit")
            if latest is not None and time.monotonic() - told > EVERY_S:
                told = time.monotonic()
                last = _shown("", curve[-1][1]) if curve else "-"
                _note(f"  step {latest.step}/{latest.num_steps}, loss {latest.loss}, last evaluation {last}")
            time.sleep(0.1)
    if summary is None:
        why = failed.message if failed else tail(workers.log.read_text(errors="replace").splitlines())
        raise ThinwireError(f"{config.recipe} with {config.workers} workers failed: {why}")
    return Run(config=config, summary=summary, wall_s=time.monotonic() - began, curve=curve)


def prepared(data: Path, scratch: Path) -> Path:
    """`data`, or a folder that shows all of it and the CIFAR-10 arrays unpacked from its cifar10_dct.npz."""
    packed, decoder = data / "cifar10_dct.npz", data / "cifar10.py"
    if not (packed.exists() and decoder.exists()) or (data / "cifar10.npz").exists():
        return data
    folder = scratch / "data"
    folder.mkdir()
    for path in data.iterdir():
        (folder / path.name).symlink_to(path.absolute())
    subprocess.run([sys.executable, str(decoder), str(packed), str(folder / "cifar10.npz")], check=True)
    return folder


def configs(arguments: argparse.Namespace, data: Path) -> list[RunConfig]:
    """The runs asked for; recipes without data are left out."""
    found = []
    for name in arguments.recipes.split(","):
        recipe = registry.get(name)
        for workers in map(int, arguments.workers.split(",")):
            batch_size = arguments.batch_size or recipe.batch_size
            choices = Choices(
                strategy=arguments.strategy,
                settings={},
                workers=workers,
                epochs=arguments.epochs,
                batch_size=max(1, batch_size // workers) if arguments.divide_batch else batch_size,
                seed=arguments.seed,
                data=data,
                device=arguments.device,
            )
            try:
                found.append(resolve(name, recipe, choices))
            except DataError as error:
                _note(f"left out: {name}: {error.message}")
                break
    return found


def report(runs: list[Run], failures: list[str], config: dict[str, Any]) -> dict[str, Any]:
    """All there is to know about the runs, as JSON."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        **provenance(),
        "gpu": gpu,
        "config": config,
        "runs": [
            {
                "config": asdict(run.config),
                "summary": plain(run.summary),
                "wall_s": run.wall_s,
                "curve": run.curve,
            }
            for run in runs
        ],
        "failures": failures,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
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
    return parser.parse_args(arguments)


def main() -> None:
    """Run, print the table, keep the numbers."""
    arguments = parse()
    deadline = time.monotonic() + arguments.limit
    chosen = {key: str(value) for key, value in vars(arguments).items()}
    runs, failures = list[Run](), list[str]()
    path: Path | None = None
    with tempfile.TemporaryDirectory() as scratch:
        data = prepared(arguments.data, Path(scratch))
        for number, config in enumerate(configs(arguments, data)):
            _note(f"{config.recipe}, {config.workers} workers, {config.epochs} epochs")
            folder = Path(scratch) / f"run-{number}"
            folder.mkdir()
            try:
                runs.append(run(config, folder, deadline))
                _note(f"  {runs[-1].row()}")
            except ThinwireError as error:
                failures.append(f"{config.recipe}, {config.workers} workers: {error.message}")
                _note(f"  failed: {failures[-1]}")
            if path is not None:
                path.unlink()
            path = save("recipes", report(runs, failures, chosen), trial=False)
    print("\n".join([HEAD, *(each.row() for each in runs)]))
    for failure in failures:
        print(f"\nfailed: {failure}")
    print(f"\n{path.relative_to(RESULTS.parents[1]) if path else 'nothing was run'}")
    if failures:
        sys.exit(1)


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    # workers are started from here with this environment; they must find the same code
    here = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([f"{here}/src", os.environ.get("PYTHONPATH", "")])
    main()
