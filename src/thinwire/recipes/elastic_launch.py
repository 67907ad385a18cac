"""Starts the workers of an elastic run on this machine, none of which ends the others.

Torch's launcher ends all workers when one dies. Here the run goes on while one lives. As there, workers have
a lifeline: they end when the command that started them is gone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from thinwire.elastic.keys import write_key
from thinwire.recipes import worker
from thinwire.recipes.launch import GRACE_S, LOG, WorkerFailure, environment

KEY = "run.key"
KEY_VARIABLE = "THINWIRE_KEY_FILE"


class ElasticWorkers:
    """The running workers of one run folder; leaving the `with` block ends all that still run."""

    end_together = False
    """Whether one that fails ends the run."""

    def __init__(self, run: Path, num_workers: int, *, arguments: Sequence[str] = ()) -> None:
        self.log = run / LOG
        self.worker_pids: set[int] = set()
        given = environment(os.environ, num_workers)
        if KEY_VARIABLE not in given:
            key = run / KEY
            key.unlink(missing_ok=True)
            write_key(key)
            given[KEY_VARIABLE] = str(key.absolute())
        with socket.create_server(("127.0.0.1", 0)) as free:
            given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        command = [sys.executable, "-u", "-m", worker.__name__, str(run), *arguments]
        with self.log.open("wb") as log:
            self._workers = [
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**given, "WORLD_SIZE": str(num_workers), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    start_new_session=True,
                )
                for rank in range(num_workers)
            ]

    def __enter__(self) -> ElasticWorkers:
        return self

    def __exit__(self, *exception: object) -> None:
        for each in self._workers:
            assert each.stdin is not None
            each.stdin.close()
        deadline = time.monotonic() + GRACE_S
        for each in self._workers:
            try:
                each.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()

    def poll(self) -> int | None:
        """None while a worker lives; then 0 if one has trained to the end, else the first one's status."""
        codes = [each.poll() for each in self._workers]
        if None in codes:
            return None
        return 0 if 0 in codes else abs(codes[0] or 1)

    @property
    def lost(self) -> list[WorkerFailure]:
        """Workers that did not train to the end."""
        return [
            WorkerFailure(rank, each.pid, each.returncode)
            for rank, each in enumerate(self._workers)
            if each.poll() not in (None, 0)
        ]

    @property
    def failure(self) -> WorkerFailure | None:
        return next(iter(self.lost), None)
