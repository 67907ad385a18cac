"""The first process of a lab: creates the network, forks the workers, serves their requests, applies faults.

Started as `python -m thinwire.lab.supervisor FD`, with FD a connection to the process that wants the lab: it
sends the job and receives the result; when it closes the connection, the lab ends. There is one thread and
one loop: workers are forked from this process, which is safe only without threads.
"""

from __future__ import annotations

import gc
import importlib
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from thinwire.errors import ThinwireError
from thinwire.hosts.description import Fault, parse_fault
from thinwire.hosts.machine import raise_open_files
from thinwire.lab.calibrate import CpuLoad
from thinwire.lab.network import ShapedNetwork
from thinwire.lab.run import Job, LabResult, WorkerExit
from thinwire.lab.worker import WORKER_SIGNALS, BecomeWorker, LabWorker, start_store

TICK_S = 0.01
DRAIN_S = 2.0
"""Time to wait for output after the last worker has ended."""
KILL_AFTER_S = 5.0
"""Time between SIGTERM and SIGKILL."""
# torch._dynamo is imported by the first optimizer step.
PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo")
"""Imported before forking: 4 s of processor time for 8 workers together instead of 30 s."""


class FaultSchedule:
    """Returns every fault once when it is due, and its end after its duration."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.pending = list(faults)
        self._ends: list[tuple[float, Fault]] = []

    def due(self, now_s: float, steps: Sequence[int], alive: Sequence[bool]) -> list[tuple[Fault, bool]]:
        """Return the faults due now, in the order they were written, and whether each ends."""
        ended = [(fault, True) for end_s, fault in self._ends if end_s <= now_s]
        self._ends = [(end_s, fault) for end_s, fault in self._ends if end_s > now_s]
        due = [fault for fault in self.pending if _is_due(fault, now_s, steps, alive)]
        for fault in due:
            self.pending.remove(fault)
            if fault.seconds is not None:
                self._ends.append((now_s + fault.seconds, fault))
        return ended + [(fault, False) for fault in due]


def _is_due(fault: Fault, now_s: float, steps: Sequence[int], alive: Sequence[bool]) -> bool:
    if fault.after_s is not None:
        return now_s >= fault.after_s
    assert fault.step is not None
    # A site, and a host whose worker is dead, follow the worker that is furthest ahead.
    done = steps[fault.host] if fault.host is not None and alive[fault.host] else max(steps)
    return done >= fault.step


class Supervisor:
    """One run of one job."""

    def __init__(self, job: Job, network: ShapedNetwork, channel: Connection[Any, Any]) -> None:
        self._job, self._network, self._channel = job, network, channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._read_channel)
        hosts = job.description.hosts
        self._workers = [LabWorker(job, *each) for each in zip(hosts, network.namespaces, strict=True)]
        self._schedule = FaultSchedule(job.description.faults)
        self._load, self._training = CpuLoad(), False
        self._failure: int | None = None
        self._terminate_at_s = self._kill_at_s = math.inf
        self._log: list[str] = []
        self._reports: list[object] = []
        self._start_s = self._faults_s = time.monotonic()
        self._started_at = time.time()

    def run(self) -> LabResult:
        """Start all workers, wait until the last one has ended, and return the result."""
        for each in WORKER_SIGNALS:
            signal.signal(each, lambda number, _: self._stop(128 + number))
        if self._job.python_arguments:
            start_store(self._network.namespaces[0], self._job.description.hosts[0], self._selector)
        for worker in self._workers:
            worker.start(self._selector, self._answer)
        self._start_s = self._faults_s = time.monotonic()
        self._started_at = time.time()
        while any(worker.alive for worker in self._workers):
            self._serve()
            self._reap()
            self._apply_due_faults()
            self._check_time()
            # The load counts from the first step on: imports and connecting are not training.
            if not self._training and any(worker.status.steps for worker in self._workers):
                self._training = True
                self._faults_s = time.monotonic()
                self._load.restart()
            self._load.sample()
        until_s = time.monotonic() + DRAIN_S
        while len(self._selector.get_map()) > 1 and time.monotonic() < until_s:  # more than the channel
            self._serve()
        return self._result()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _say(self, words: str) -> None:
        line = f"{self._now_s():.2f} s: {words}"
        self._log.append(line)
        os.write(2, f"[lab] {line}\n".encode())

    def _serve(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            key.data()

    def _read_channel(self) -> None:
        try:
            self._channel.recv()
        except (EOFError, OSError):
            os._exit(1)  # the caller is gone; the kernel ends all processes of the lab with this one
        self._stop(128 + signal.SIGINT)

    def _reap(self) -> None:
        """Take note of processes that have ended; orphans are our children too, and no worker's."""
        with suppress(ChildProcessError):
            while (waited := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(waited[1])
                for worker in self._workers:
                    if worker.pid == waited[0] and worker.alive:
                        worker.exit_code = code if code >= 0 else 128 - code
                        self._record_exit(worker)

    def _record_exit(self, worker: LabWorker) -> None:
        if worker.exit_code == 0 or worker.scheduled or self._failure is not None:
            return
        self._failure = worker.exit_code
        self._say(f"host {worker.host.index} failed with exit code {worker.exit_code}")
        if not self._job.keep_going:
            self._terminate_at_s = time.monotonic() + self._job.grace_s

    def _stop(self, code: int) -> None:
        """End the run early: SIGTERM now, SIGKILL later."""
        self._failure = self._failure or code
        self._terminate_at_s = time.monotonic()

    def _check_time(self) -> None:
        now_s, limit_s = time.monotonic(), self._job.time_limit_s
        if limit_s is not None and self._now_s() > limit_s and self._terminate_at_s == math.inf:
            self._say(f"the time limit of {limit_s:g} s is reached")
            self._stop(124)  # as timeout(1)
        if now_s >= self._terminate_at_s and self._kill_at_s == math.inf:
            self._kill_at_s = now_s + KILL_AFTER_S
            for worker in self._workers:
                worker.signal(signal.SIGTERM)
                worker.signal(signal.SIGCONT)  # a paused worker does not receive SIGTERM
        if now_s >= self._kill_at_s:
            for worker in self._workers:
                worker.signal(signal.SIGKILL)

    def _result(self) -> LabResult:
        warnings = [f"fault {fault} was not reached" for fault in self._schedule.pending]
        return LabResult(
            exit_code=self._failure or 0,
            seconds=self._now_s(),
            workers=tuple(
                WorkerExit(
                    host=worker.host.index,
                    exit_code=worker.exit_code or 0,
                    steps=worker.status.steps,
                    scheduled=worker.scheduled,
                    starts=worker.starts,
                )
                for worker in self._workers
            ),
            counters=tuple(self._network.counters()),
            faults=tuple(self._log),
            warnings=tuple(filter(None, [*warnings, self._load.warning()])),
            busy_share=self._load.busy_share,
            started_at=self._started_at,
            reports=tuple(self._reports),
        )

    def _apply_due_faults(self) -> None:
        steps = [worker.status.steps for worker in self._workers]
        alive = [worker.alive for worker in self._workers]
        now_s = self._now_s()
        if self._job.faults_from_first_step:
            now_s = time.monotonic() - self._faults_s if self._training else -1.0
        for fault, ends in self._schedule.due(now_s, steps, alive):
            self._apply_fault(fault, ends=ends)
            # The worker waits at this step until the fault is applied (StepCounter).
            if fault.step is not None and fault.host is not None and not ends:
                status = self._workers[fault.host].status
                status.released = max(status.released, fault.step)

    def _apply_fault(self, fault: Fault, *, ends: bool) -> None:
        self._say(f"end of {fault}" if ends else f"{fault}")
        ends = ends or fault.kind == "heal"
        kinds = ("pause", "slow", "cut") if fault.kind == "heal" else (fault.kind,)
        if "cut" in kinds:
            self._network.set_path(host=fault.host, site=fault.site, up=ends)
        if fault.host is None:
            return
        worker = self._workers[fault.host]
        if "slow" in kinds:
            worker.status.speed = worker.host.speed * (1.0 if ends else fault.speed or 1.0)
        if "pause" in kinds:
            worker.signal(signal.SIGCONT if ends else signal.SIGSTOP)
        if fault.kind == "kill":
            worker.scheduled = worker.alive
            worker.signal(signal.SIGKILL)
        if fault.kind == "rejoin" and not worker.alive:
            worker.start(self._selector, self._answer)

    def _answer(self, request: dict[str, Any]) -> object:
        """Answer one request of a worker; an exception refuses it."""
        match request["do"]:
            case "rate":
                self._network.set_rate(request["bit_per_s"], host=self._check_host(request["host"]))
            case "fault":
                fault = parse_fault(f"{request['fault']},after=0")
                self._check_host(fault.host)
                self._schedule.pending.append(fault)
                self._apply_due_faults()
            case "counters":
                return self._network.counters()
            case "uplinks":
                return self._network.uplinks()
            case "report":
                self._reports.append(request["value"])
            case "restart_load":
                self._load.restart()
            case "load":
                return self._load.busy_share, self._load.warning()
        return None

    def _check_host(self, host: int | None) -> int | None:
        if host is not None and host not in range(len(self._workers)):
            raise ThinwireError(f"unknown host {host!r}")
        return host


def main() -> None:
    channel: Connection[Any, Any] = Connection(int(sys.argv[1]))
    result: LabResult | ThinwireError | Callable[[], NoReturn]
    try:
        result = _run(channel.recv(), channel)
    except ThinwireError as problem:
        result = problem
    except BecomeWorker as forked:
        (result,) = forked.args
    if callable(result):  # after the handler: the worker's errors shall have no context
        result()
    channel.send(result)
    gc.unfreeze()  # or libraries complain at exit about objects that were not collected (Triton 3.9)


def _run(job: Job, channel: Connection[Any, Any]) -> LabResult:
    raise_open_files()  # 200 hosts need more than the usual 1,024
    network = ShapedNetwork(job.description)
    if job.python_arguments:
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every page the workers share
    return Supervisor(job, network, channel).run()


if __name__ == "__main__":
    main()
