"""How far does the simulator go on this machine? Wall seconds and memory of three large simulations.

    python -m benchmarks.scale --data DIR                 about ten minutes on 2 cores
    python -m benchmarks.scale --cases sizes              one of them, seconds

Each case is one `thinwire simulate` command, as a user would type it, in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import note, parser_of, print_head, print_row, result_file

STRATEGY = ("--strategy", "all-reduce", "--compute", "0.2s", "--json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleCase:
    """One simulation and the time it may take."""

    what: str
    arguments: tuple[str, ...]
    limit_s: float
    needs_data: bool = False
    trains: bool = True


CASES = {
    "epoch": ScaleCase(
        what="mnist-cnn, 64 workers, one epoch",
        arguments=("mnist-cnn", "--workers", "64", "--epochs", "1", *STRATEGY),
        limit_s=300,
        needs_data=True,
    ),
    "workers": ScaleCase(
        what="digits-cnn, 1,024 workers, 100 steps",
        arguments=(
            *("digits-cnn", "--workers", "1024", "--batch-size", "1", "--epochs", "100", "--steps", "100"),
            *STRATEGY,
        ),
        limit_s=600,
    ),
    "sizes": ScaleCase(
        what="resnet50, sizes alone, 10,000 workers, 7 steps",
        arguments=("--emulate", "resnet50", "--workers", "10000", "--strategy", "all-reduce", "--json"),
        limit_s=60,
        trains=False,
    ),
}


def play(case: ScaleCase, data: Path | None) -> dict[str, Any]:
    """Run the command; return its output and its cost, interpreter and imports included."""
    with TemporaryDirectory() as scratch:
        more = ["--out", f"{scratch}/run"] if case.trains else []
        more += ["--data", str(data)] if case.needs_data else []
        began_s = time.monotonic()
        playing = subprocess.Popen(
            [sys.executable, "-m", "thinwire", "simulate", *case.arguments, *more], stdout=subprocess.PIPE
        )
        assert playing.stdout is not None
        printed = playing.stdout.read()
        _, status, usage = os.wait4(playing.pid, 0)
        playing.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.monotonic() - began_s
    if playing.returncode != 0:
        sys.exit(f"{case.what}: exit code {playing.returncode}")
    (result,) = json.loads(printed)
    for key in ("run", "accounts"):
        result.pop(key, None)
    used = {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, "memory_mb": usage.ru_maxrss / 1024}
    return {**asdict(case), "result": result, **used}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, help="folder with MNIST (docs/recipes.md)")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated: epoch, workers, sizes")
    arguments = parser.parse_args()
    chosen = [CASES[name] for name in arguments.cases.split(",")]
    if arguments.data is None and any(case.needs_data for case in chosen):
        parser.error("--data is needed for the case epoch")
    file, found = result_file("scale"), list[dict[str, Any]]()
    print_head("simulation", "wall s", "may take", "processor s", "memory")
    for case in chosen:
        found.append(play(case, arguments.data))
        row = found[-1]
        times = (f"{row['wall_s']:.1f}", f"{case.limit_s:.0f}", f"{row['cpu_s']:.1f}")
        print_row(case.what, *times, f"{row['memory_mb']:.0f} MB")
    note(f"\nsaved {file.save({'cases': found})}")


if __name__ == "__main__":
    main()
