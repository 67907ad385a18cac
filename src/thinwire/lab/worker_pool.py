"""The worker processes of a lab: forking, signalling and reaping them, reading their output; no torch."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.lab.control import HostStatus
from thinwire.lab.run import Job
from thinwire.lab.worker import WORKER_SIGNALS, WorkerSpec, serve_store


class BecomeWorker(BaseException):
    """Raised with a WorkerSpec in a forked process: its stack unwinds before it becomes a worker."""


@dataclass(slots=True)
class LabWorker:
    """The worker process of one host, as the lab sees it."""

    spec: WorkerSpec
    pid: int
    status: HostStatus
    exit_code: int | None = None
    """The exit code as a shell reports it; None while the process runs."""
    scheduled: bool = False
    """Whether a scheduled fault has killed it."""

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def signal(self, number: int) -> None:
        """Send a signal to the worker and the processes it started."""
        if self.alive:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                os.kill(self.pid, number)  # it was forked just now and has no session of its own yet


class WorkerPool:
    """All workers of one job. `selector` serves their output, `answer` their requests."""

    def __init__(
        self,
        job: Job,
        namespaces: list[int],
        selector: selectors.BaseSelector,
        answer: Callable[[dict[str, Any]], object],
    ) -> None:
        self._job, self._namespaces = job, namespaces
        self._selector, self._answer = selector, answer
        self.workers: dict[int, LabWorker] = {}

    def __iter__(self) -> Iterator[LabWorker]:
        return iter(self.workers.values())

    def start(self, index: int) -> None:
        """Fork the worker of a host, for the first time or again; in the child this raises BecomeWorker."""
        old = self.workers.get(index)
        host = self._job.description.hosts[index]
        # The memory is reused, so that whoever has mapped it also sees the new worker's steps.
        status_file = os.memfd_create(f"status{index}") if old is None else old.spec.status
        status = HostStatus.create(status_file, speed=host.speed)
        ours, theirs = Pipe()
        pipes = [os.pipe(), os.pipe()]
        spec = WorkerSpec(
            job=self._job,
            host=index,
            starts=1 if old is None else old.spec.starts + 1,
            network=self._namespaces[index],
            outputs=(pipes[0][1], pipes[1][1]),
            control=theirs,
            status=status_file,
        )
        # Blocked until the child has handlers of its own: a signal in between would be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._close_in_child()
            raise BecomeWorker(spec)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_SIGNALS)
        self.workers[index] = LabWorker(spec, pid, status)
        theirs.close()  # the worker has its own copy; with ours open, its end would go unnoticed
        answer_requests(ours, self._selector, self._answer)
        prefix = f"[{host.name}] " if self._job.prefix else ""
        for (reading, writing), target in zip(pipes, (1, 2), strict=True):
            os.close(writing)
            forward_output(reading, target, prefix, self._selector)

    def start_store(self) -> None:
        """Fork the process on host 0 that serves torch's rendezvous store."""
        if os.fork() == 0:
            self._close_in_child()
            serve_store(self._namespaces[0], self._job.description.hosts[0])

    def reap(self) -> list[LabWorker]:
        """Return the workers that have ended since the last call; also reap orphaned processes."""
        ended: list[LabWorker] = []
        with suppress(ChildProcessError):
            while (waited := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(waited[1])
                for worker in self:  # none of them for an orphan, which has become our child
                    if worker.pid == waited[0] and worker.alive:
                        worker.exit_code = code if code >= 0 else 128 - code
                        ended.append(worker)
        return ended

    def signal(self, number: int) -> None:
        """Send a signal to all workers."""
        for worker in self:
            worker.signal(number)

    def _close_in_child(self) -> None:
        for key in self._selector.get_map().values():
            # An object must be closed as one: collected later, it would close a reused descriptor.
            os.close(key.fileobj) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()


def forward_output(source: int, target: int, prefix: str, selector: selectors.BaseSelector) -> None:
    """Copy complete lines from a pipe to `target`, each with a prefix, until the other side closes it."""
    rest = b""

    def ready() -> None:
        nonlocal rest
        data = os.read(source, 1 << 16)
        *lines, rest = (rest + data).split(b"\n")
        if not data and rest:
            lines = [rest]
        text = b"".join(prefix.encode() + line + b"\n" for line in lines)
        with suppress(BrokenPipeError):  # the reader (head, less) is gone; the run continues
            while text:
                text = text[os.write(target, text) :]
        if not data:
            selector.unregister(source)
            os.close(source)

    selector.register(source, selectors.EVENT_READ, ready)


def answer_requests(
    source: Connection[Any, Any],
    selector: selectors.BaseSelector,
    answer: Callable[[dict[str, Any]], object],
) -> None:
    """Answer every request that arrives, if need be with an error, until the other side closes."""

    def ready() -> None:
        try:
            try:
                source.send(answer(source.recv()))
            except ThinwireError as refusal:
                source.send(refusal)
        except (EOFError, OSError):  # it has ended
            selector.unregister(source)
            source.close()

    selector.register(source, selectors.EVENT_READ, ready)
