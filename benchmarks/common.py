"""Shared by the scripts here: output, result files, worker processes, labs, and grids of timed blocks."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinwire.bench.config import BenchConfig, provenance
from thinwire.bench.run import measure, prepare
from thinwire.event_log import read_events
from thinwire.events import Event, StepTimed
from thinwire.hosts.description import Description
from thinwire.hosts.quantities import format_rate
from thinwire.lab.control import Control
from thinwire.lab.run import Job, LabResult, run
from thinwire.timings import Spread

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRIALS = ROOT / "runs" / "benchmarks"
"""For runs that only show that a script works; git ignores it."""


@dataclass(slots=True)
class ResultFile:
    """A JSON file with a result and its provenance at the beginning and at the end of the measurement."""

    folder: Path
    name: str
    begin: dict[str, Any] = field(default_factory=provenance)
    path: Path | None = None

    def save(self, result: Mapping[str, Any], **lists: Sequence[Any]) -> Path:
        """Write the result; saving again replaces it, so that a long measurement can be kept as it grows. Of
        `lists` each item gets one line."""
        if self.path is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.path = self._new()
        content = {"begin": self.begin, "end": provenance(), **result}
        text = json.dumps({**content, **{name: [] for name in lists}}, indent=1, default=str)
        for name, items in lists.items():
            lines = ",\n  ".join(json.dumps(item, default=str) for item in items)
            text = text.replace(f'"{name}": []', f'"{name}": [\n  {lines}\n ]')
        self.path.write_text(text + "\n")
        return self.path

    def _new(self) -> Path:
        stem = f"{self.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        for suffix in ("", *(f"-{number}" for number in range(2, 100))):
            path = self.folder / f"{stem}{suffix}.json"
            try:
                path.touch(exist_ok=False)  # two that end in the same second both stay
            except FileExistsError:
                continue
            return path
        raise FileExistsError(f"too many results called {stem} in {self.folder}")


def result_file(name: str, *, trial: bool = False) -> ResultFile:
    """The file of a result; call it before measuring, since it also records how the machine was then."""
    return ResultFile(TRIALS if trial else RESULTS, name)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """No other process is in here for the same folder: several commands may add to one file."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser described by the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])


def note(text: str) -> None:
    """Print progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_head(*columns: str) -> None:
    """Begin a Markdown table on stdout."""
    print_row(*columns)
    print("|" + " --- |" * len(columns), flush=True)


def print_row(*cells: object) -> None:
    """Add a row to a Markdown table on stdout."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def spread_of(values: Sequence[float], *, scale: float = 1.0, digits: int = 1) -> str:
    """The median, with quartiles in parentheses."""
    spread = Spread.of([scale * value for value in values])
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


# -- processes ------------------------------------------------------------------------------------------


def run_workers(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(*args)` in local processes started by torch's own launcher; results in order of rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="benchmark",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    results: dict[int, Any] = elastic_launch(config, work)(*args)
    return [results[rank] for rank in range(world_size)]


def run_in_lab(description: Description, *command: str, time_limit_s: float = 1200) -> LabResult:
    """Run `python -m command` on every host of a lab; exit if it fails."""
    outcome = run(Job(description=description, command=("-m", *command), time_limit_s=time_limit_s))
    if outcome.exit_code != 0:
        sys.exit(f"the workers in the lab failed with exit code {outcome.exit_code}")
    for warning in outcome.warnings:
        note(f"warning: {warning}")
    return outcome


@contextmanager
def lab_worker() -> Iterator[Control]:
    """The process group of a worker in a lab, and its line to the lab."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control = Control.from_environment()
    assert control is not None, "to be run in a lab"
    yield control
    dist.barrier()
    dist.destroy_process_group()


# -- grids of `thinwire bench` --------------------------------------------------------------------------


def time_grid(config: BenchConfig, systems: Sequence[str], *, loopback: bool = False) -> list[StepTimed]:
    """Time systems by turns with the harness of `thinwire bench`, in labs or over loopback."""
    setup = prepare(config, list(systems))
    if loopback:
        setup = replace(setup, no_lab="loopback was asked for")
    elif setup.no_lab is not None:
        sys.exit(f"rates cannot be set here: {setup.no_lab}")
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch), setup, _note_block, lambda what, left_s: note(f"{what} ..."))
        return [e.record for e in read_events(Path(scratch)) if isinstance(e.record, StepTimed)]


def _note_block(folder: Path, event: Event) -> None:
    if isinstance(event.record, StepTimed):
        timed = event.record
        rate = "loopback" if timed.rate_bits_per_s is None else format_rate(timed.rate_bits_per_s)
        result = timed.unavailable or f"{timed.step_s:.3f} s"
        note(f"  turn {timed.turn + 1}: {timed.workers} workers, {rate}, {timed.system}: {result}")
