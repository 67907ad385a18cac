"""Starts the workers of a run on this machine through torch's elastic launcher, and ends them.

The launcher is a process in a session of its own, so Ctrl-C reaches us alone, and we end the rest by the ids
we know. Its standard input, which workers inherit, is a pipe whose other end only we hold: when we are gone,
however that came, every worker reads the end of it and stops.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from thinwire.recipes.worker import LIFELINE

LOG = "workers.log"
MODULE = "thinwire.recipes.worker"
GRACE_S = 5.0


class LocalWorkers:
    """The running workers of one run folder; leaving the `with` block ends all that is left of them."""

    def __init__(
        self, run: Path, num_workers: int, *, module: str = MODULE, arguments: Sequence[str] = ()
    ) -> None:
        self.log = run / LOG
        self._scratch = run / "launcher"  # else torch leaves its folder in /tmp
        self._worker_pids: set[int] = set()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_workers), "--log-dir", str(self._scratch)]
        command += ["-m", module, str(run), *arguments]
        with self.log.open("wb") as log:
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(os.environ, num_workers),
                start_new_session=True,
            )

    def knows(self, pid: int) -> None:
        """Remember a worker's process id, for the case that the launcher does not end it."""
        self._worker_pids.add(pid)

    def poll(self) -> int | None:
        """The launcher's exit status, None while it runs."""
        return self._launcher.poll()

    def stop(self) -> None:
        """End everything, gently first; does nothing if everything has ended."""
        assert self._launcher.stdin is not None
        running = self.poll() is None
        self._launcher.stdin.close()
        if running:
            self._launcher.send_signal(signal.SIGTERM)
        if not self._ended_within(GRACE_S):
            self._kill()
        self._launcher.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill(self) -> None:
        self._launcher.kill()
        for pid in self._worker_pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended already

    def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.poll() is None or any(map(_exists, self._worker_pids)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except KeyboardInterrupt:  # Ctrl-C again: no more patience
            self._kill()
            raise


def environment(given: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """The environment of the workers: `given`, with the cores shared out and the lifeline announced."""
    ours = dict(given)
    ours.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_workers)))
    ours[LIFELINE] = "1"
    # a file of the user's called, say, random.py must not be taken for Python's
    ours["PYTHONSAFEPATH"] = "1"
    return ours


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that ended without a word, as the launcher saw it."""

    rank: int
    pid: int
    status: int
    """Its exit status; -9 means killed by signal 9."""

    @property
    def how(self) -> str:
        """In words."""
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"


_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*:\s*(?P<rank>\d+).*?exitcode\s*:\s*(?P<status>-?\d+)\s*\(pid:\s*(?P<pid>\d+)\)",
    re.DOTALL,
)


def first_death(log: Path) -> Death | None:
    """Who died first, read from the launcher's report; a killed worker cannot tell it in its events."""
    try:
        found = _ROOT_CAUSE.search(log.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if found is None:
        return None
    return Death(int(found["rank"]), int(found["pid"]), int(found["status"]))


def tail(lines: Iterable[str], count: int = 5) -> str:
    """The last few lines that say something."""
    return "\n".join([line.rstrip() for line in lines if line.strip()][-count:])
