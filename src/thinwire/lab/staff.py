"""The worker processes of a lab: started, signalled, counted out; no torch of its own."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.lab.job import Job
from thinwire.lab.output import Lines, answer_requests
from thinwire.lab.pace import Pace
from thinwire.lab.worker import WORKER_SIGNALS, Birth, serve_store

Answer = Callable[[dict[str, object]], object]


class BecomeWorker(BaseException):
    """Raised in a forked process, so that its stack unwinds to the top before it becomes a worker."""

    def __init__(self, birth: Birth) -> None:
        super().__init__()
        self.birth = birth


@dataclass(slots=True)
class Worker:
    """The worker of one host, as the lab sees it."""

    host: int
    pid: int
    starts: int
    pace: Pace
    pace_file: int
    exit_code: int | None = None
    """As a shell says it; None while it runs."""
    scheduled: bool = False
    """Killed by a fault of the schedule."""
    ours: list[socket.socket] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def signal(self, number: int) -> None:
        """Send a signal to the worker and the processes it started."""
        if not self.alive:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            os.kill(self.pid, number)  # so young that it has no session of its own yet


class Staff:
    """All workers of one job. Their output and requests are served through `selector`."""

    def __init__(
        self, job: Job, namespaces: list[int], selector: selectors.BaseSelector, channel: socket.socket
    ) -> None:
        self._job = job
        self._namespaces = namespaces
        self._selector = selector
        self._channel = channel
        self.workers: dict[int, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers.values())

    def start(self, index: int, answer: Answer) -> None:
        """Fork the worker of a host, for the first time or again; in the child this raises BecomeWorker."""
        old = self.workers.get(index)
        host = self._job.description.hosts[index]
        pace_file = os.memfd_create(f"pace{index}") if old is None else old.pace_file
        pace = Pace.create(Path(f"/proc/self/fd/{pace_file}"), speed=host.speed)
        starts = 1 if old is None else old.starts + 1
        ours, theirs = socket.socketpair()
        pipes = [os.pipe(), os.pipe()]
        # Blocked until the child has handlers of its own, so that none reaches it in between and is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._close_in_child()
            raise BecomeWorker(
                Birth(
                    job=self._job,
                    host=index,
                    starts=starts,
                    network=self._namespaces[index],
                    outputs=(pipes[0][1], pipes[1][1]),
                    control=theirs.detach(),
                    pace=pace_file,
                )
            )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
        theirs.close()
        self.workers[index] = Worker(index, pid, starts, pace, pace_file, ours=[ours])
        answer_requests(ours, self._selector, answer)
        prefix = f"[{host.name}] " if self._job.prefix else ""
        for (reading, writing), target in zip(pipes, (1, 2), strict=True):
            os.close(writing)
            Lines(reading, target, prefix, self._selector)

    def start_store(self) -> None:
        """Fork the process at which torch's workers meet, on host 0."""
        if os.fork() == 0:
            self._close_in_child()
            serve_store(self._namespaces[0], self._job.description.hosts[0])

    def reap(self) -> list[Worker]:
        """The workers that have ended since the last call; orphans are collected on the way."""
        ended: list[Worker] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            for worker in self.workers.values():
                if worker.pid == pid and worker.alive:
                    code = os.waitstatus_to_exitcode(status)
                    worker.exit_code = code if code >= 0 else 128 - code
                    ended.append(worker)

    def signal(self, number: int) -> None:
        """Send a signal to all workers."""
        for worker in self.workers.values():
            worker.signal(number)

    def _close_in_child(self) -> None:
        # Closed as objects, not by number: an object that is collected later must not close what was
        # opened under its number meanwhile.
        for worker in self.workers.values():
            for connection in worker.ours:
                connection.close()
        self._selector.close()
        self._channel.close()
