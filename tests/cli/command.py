"""Starts the real command line for the tests, and looks after its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.patience import HANGS_S
from thinwire.event_log import read_events
from thinwire.events import RunStarted

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    """As a user has it, with the faulty recipes in reach; not that of a torchrun the tests may be in."""
    keep = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    return {**keep, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def thinwire(*arguments: str, timeout_s: float = HANGS_S) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "thinwire", *arguments]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False
    )


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command while it runs; killed at the end if it has not ended."""
    command = [sys.executable, "-m", "thinwire", *arguments]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = HANGS_S
) -> None:
    """Return once `condition` holds; fail if it does not in time, or if the command has ended instead."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() in (None, -signal.SIGKILL), process.communicate()[1]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def worker_pids(run: Path) -> dict[int, int]:
    """Process ids by rank, as far as workers have started."""
    return {
        event.rank: event.record.pid for event in read_events(run) if isinstance(event.record, RunStarted)
    }


def is_training(run: Path, num_workers: int) -> bool:
    """Whether all workers have made some steps."""
    return len({event.rank for event in read_events(run) if event.record.kind == "progress"}) == num_workers


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def end(pids: Iterator[int] | list[int]) -> None:
    """Leave nothing behind when a test has failed."""
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
