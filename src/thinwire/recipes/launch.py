"""Starts the workers of a run on this machine with torch's elastic launcher, and ends them.

The elastic agent blocks until its workers end, and handles signals. So it has a process of its own, which is
`python -m thinwire.recipes.launch`, in a session of its own: Ctrl-C reaches only the command that started it.
Its standard input, inherited by the workers, is a pipe whose other end only that command holds: when the
command is gone, for whatever reason, every worker reads the end of the pipe and stops.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.hosts.machine import KEEPS_MEMORY, num_cores
from thinwire.recipes import worker

LOG = "workers.log"
FAILURE = "failure.json"
GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The first worker that did not end with status 0, as the elastic agent saw it."""

    rank: int
    pid: int
    status: int
    """Exit status; -9 means killed by signal 9."""

    @property
    def how(self) -> str:
        if self.status >= 0:
            return f"ended with status {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"


class LocalWorkers:
    """The running workers of one run folder; leaving the `with` block ends all that still run."""

    end_together = True
    """Whether one that fails ends the run."""
    failure: WorkerFailure | None = None
    """The first failure, known after the `with` block; a killed worker cannot write it into its events."""

    @property
    def lost(self) -> list[WorkerFailure]:
        """Workers without which a run has gone on: none."""
        return []

    def __init__(
        self, run: Path, num_workers: int, *, module: str = worker.__name__, arguments: Sequence[str] = ()
    ) -> None:
        self.log = run / LOG
        self._scratch = run / "launcher"  # by default the elastic agent would leave a folder in /tmp
        self.worker_pids: set[int] = set()
        """Workers to kill if the launcher does not; whoever reads their events adds them."""
        command = [sys.executable, "-m", __name__, str(num_workers), str(self._scratch), module, str(run)]
        with self.log.open("wb") as log:
            self._launcher = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(os.environ, num_workers),
                start_new_session=True,
            )
        self.poll = self._launcher.poll
        """Returns the launcher's exit status, None while it runs."""

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._launcher.stdin is not None
        self._launcher.stdin.close()
        self._launcher.terminate()
        try:
            if not self._ended_within(GRACE_S):
                self._kill()
            self._launcher.wait()
        except KeyboardInterrupt:  # Ctrl-C again: do not wait any longer
            self._kill()
            raise
        with suppress(OSError, ValueError, TypeError):  # no worker has failed, or the launcher was killed
            self.failure = WorkerFailure(**json.loads((self._scratch / FAILURE).read_text(encoding="utf-8")))
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _kill(self) -> None:
        self._launcher.kill()
        for pid in self.worker_pids:
            with suppress(ProcessLookupError):  # it has ended already
                os.kill(pid, signal.SIGKILL)

    def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.poll() is None or any(map(_exists, self.worker_pids)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def environment(given: Mapping[str, str], num_workers: int) -> dict[str, str]:
    """The environment of the workers: `given`, with cores divided among them and the lifeline announced."""
    threads = str(max(1, num_cores() // num_workers))
    # PYTHONSAFEPATH: a file of the user's called, say, random.py must not be taken for Python's
    usual = {"OMP_NUM_THREADS": threads, **KEEPS_MEMORY}
    return {**usual, **given, worker.LIFELINE: "1", "PYTHONSAFEPATH": "1"}


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def launch(num_workers: int, scratch: Path, module: str, arguments: Sequence[str]) -> int:
    """Run `module` in `num_workers` processes until all have ended; a failure is written into `scratch`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    scratch.mkdir(exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", module, *arguments)
    except ChildFailedError as error:
        rank, failed = error.get_first_failure()
        failure = WorkerFailure(rank, failed.pid, failed.exitcode)
        (scratch / FAILURE).write_text(json.dumps(asdict(failure)), encoding="utf-8")
        return 1
    except SignalException as ended:
        return 128 + ended.sigval
    return 0


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
