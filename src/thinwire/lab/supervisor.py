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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from thinwire.errors import ThinwireError
from thinwire.hosts.description import Fault, parse_fault
from thinwire.hosts.machine import raise_open_files
from thinwire.lab.load import CpuLoad
from thinwire.lab.namespaces import replace_hosts_file
from thinwire.lab.network import ShapedNetwork
from thinwire.lab.run import Job, LabResult, WorkerExit
from thinwire.lab.worker import WorkerSpec
from thinwire.lab.worker_pool import BecomeWorker, LabWorker, WorkerPool

TICK_S = 0.01
DRAIN_S = 2.0
"""Time to wait for output after the last worker has ended."""
KILL_AFTER_S = 5.0
"""Time between SIGTERM and SIGKILL."""
TIME_LIMIT_CODE = 124
"""Exit code of a run that reached its time limit, as of timeout(1)."""
INTERRUPTED_CODE = 130
TERMINATED_CODE = 143
# torch._dynamo is imported by the first optimizer step.
PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "torch._dynamo")
"""Imported before forking: 4 s of processor time for 8 workers together instead of 30 s."""


class FaultSchedule:
    """Returns every fault once when it is due, and its end after its duration."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.pending = list(faults)
        self._ends: list[tuple[float, Fault]] = []

    def due(self, now_s: float, steps: Sequence[int], alive: Sequence[bool]) -> list[tuple[Fault, bool]]:
        """Return the faults due now, in the order they were written, and whether each ends.

        `steps` and `alive` are per host.
        """
        ended = [(fault, True) for end_s, fault in self._ends if end_s <= now_s]
        self._ends = [(end_s, fault) for end_s, fault in self._ends if end_s > now_s]
        due = [fault for fault in self.pending if _is_due(fault, now_s, steps, alive)]
        for fault in due:
            self.pending.remove(fault)
            self.started(fault, now_s)
        return ended + [(fault, False) for fault in due]

    def started(self, fault: Fault, now_s: float) -> None:
        """Schedule the end of a fault that has started now."""
        if fault.seconds is not None:
            self._ends.append((now_s + fault.seconds, fault))


def _is_due(fault: Fault, now_s: float, steps: Sequence[int], alive: Sequence[bool]) -> bool:
    if fault.after_s is not None:
        return now_s >= fault.after_s
    assert fault.step is not None
    # A site, and a host whose worker is dead, follow the worker that is furthest ahead.
    own = fault.host is not None and alive[fault.host]
    return (steps[fault.host] if own and fault.host is not None else max(steps)) >= fault.step


class Supervisor:
    """One run of one job."""

    def __init__(self, job: Job, network: ShapedNetwork, channel: Connection[Any, Any]) -> None:
        self._job, self._network, self._channel = job, network, channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._read_channel)
        self._pool = WorkerPool(job, network.namespaces, self._selector, self._answer)
        self._schedule = FaultSchedule(job.description.faults)
        self._load = CpuLoad()
        self._training = False
        self._failure: int | None = None
        self._terminate_at_s = self._kill_at_s = math.inf
        self._log: list[str] = []
        self._reports: list[object] = []
        self._start_s = time.monotonic()

    def run(self) -> LabResult:
        """Start all workers, wait until the last one has ended, and return the result."""
        for number, code in ((signal.SIGTERM, TERMINATED_CODE), (signal.SIGINT, INTERRUPTED_CODE)):
            signal.signal(number, lambda *_, code=code: self._stop(code))
        if self._job.python_arguments:
            self._pool.start_store()
        for host in self._job.description.hosts:
            self._pool.start(host.index)
        self._start_s = time.monotonic()
        while any(worker.alive for worker in self._pool):
            self._serve()
            for worker in self._pool.reap():
                self._record_exit(worker)
            self._apply_due_faults()
            self._check_time()
            # The load counts from the first step on: imports and connecting are not training.
            if not self._training and any(worker.status.steps for worker in self._pool):
                self._training = True
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

    # The loop

    def _serve(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            key.data()

    def _read_channel(self) -> None:
        try:
            self._channel.recv()
        except (EOFError, OSError):
            os._exit(1)  # the caller is gone; the kernel ends all processes of the lab with this one
        self._stop(INTERRUPTED_CODE)

    def _record_exit(self, worker: LabWorker) -> None:
        if worker.exit_code == 0 or worker.scheduled or self._failure is not None:
            return
        self._failure = worker.exit_code
        self._say(f"host {worker.spec.host} failed with exit code {worker.exit_code}")
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
            self._stop(TIME_LIMIT_CODE)
        if now_s >= self._terminate_at_s and self._kill_at_s == math.inf:
            self._kill_at_s = now_s + KILL_AFTER_S
            self._pool.signal(signal.SIGTERM)
            self._pool.signal(signal.SIGCONT)  # a paused worker does not receive SIGTERM
        if now_s >= self._kill_at_s:
            self._pool.signal(signal.SIGKILL)

    def _result(self) -> LabResult:
        warnings = [f"fault {fault} was not reached" for fault in self._schedule.pending]
        return LabResult(
            exit_code=self._failure or 0,
            seconds=self._now_s(),
            workers=tuple(
                WorkerExit(
                    host=worker.spec.host,
                    exit_code=worker.exit_code or 0,
                    steps=worker.status.steps,
                    scheduled=worker.scheduled,
                    starts=worker.spec.starts,
                )
                for worker in self._pool
            ),
            counters=tuple(self._network.counters()),
            faults=tuple(self._log),
            warnings=tuple(filter(None, [*warnings, self._load.warning()])),
            busy_share=self._load.busy_share,
            reports=tuple(self._reports),
        )

    # Faults

    def _apply_due_faults(self) -> None:
        workers = [self._pool.workers[host.index] for host in self._job.description.hosts]
        steps = [worker.status.steps for worker in workers]
        for fault, ends in self._schedule.due(self._now_s(), steps, [worker.alive for worker in workers]):
            self._apply_fault(fault, ends=ends)
            # The worker waits at this step until the fault is applied (StepCounter).
            if fault.step is not None and fault.host is not None and not ends:
                status = self._pool.workers[fault.host].status
                status.released = max(status.released, fault.step)

    def _apply_fault(self, fault: Fault, *, ends: bool = False) -> None:
        self._say(f"end of {fault}" if ends else f"{fault}")
        ends = ends or fault.kind == "heal"
        kinds = ("pause", "slow", "cut") if fault.kind == "heal" else (fault.kind,)
        if "cut" in kinds:
            self._network.set_path(host=fault.host, site=fault.site, up=ends)
        if fault.host is None:
            return
        worker = self._pool.workers[fault.host]
        if "slow" in kinds:
            speed = self._job.description.hosts[fault.host].speed
            worker.status.speed = speed if ends else speed * (fault.speed or 1.0)
        if "pause" in kinds:
            worker.signal(signal.SIGCONT if ends else signal.SIGSTOP)
        if fault.kind == "kill":
            worker.scheduled = worker.alive
            worker.signal(signal.SIGKILL)
        if fault.kind == "rejoin" and not worker.alive:
            self._pool.start(fault.host)

    # Requests of workers

    def _answer(self, request: dict[str, Any]) -> object:
        """Answer one request of a worker; an exception refuses it."""
        match request["do"]:
            case "rate":
                host = self._check_host(request["host"])
                self._network.set_rate(request["bit_per_s"], hosts=None if host is None else [host])
            case "uplink":
                self._network.set_uplink(request["bit_per_s"])
            case "fault":
                fault = parse_fault(f"{request['fault']},after=0")
                self._check_host(fault.host)
                self._schedule.started(fault, self._now_s())
                self._apply_fault(fault)
            case "counters":
                return self._network.counters()
            case "report":
                self._reports.append(request["value"])
            case "restart_load":
                self._load.restart()
            case "load":
                return self._load.busy_share, self._load.warning()
        return None

    def _check_host(self, host: int | None) -> int | None:
        if host is not None and host not in self._pool.workers:
            raise ThinwireError(f"unknown host {host!r}")
        return host


def main() -> None:
    channel: Connection[Any, Any] = Connection(int(sys.argv[1]))
    result: LabResult | ThinwireError | WorkerSpec
    try:
        result = _run(channel.recv(), channel)
    except ThinwireError as problem:
        result = problem
    except BecomeWorker as forked:
        (result,) = forked.args
    if isinstance(result, WorkerSpec):  # after the handler: the worker's errors shall have no context
        result.become()
        result.run()
    channel.send(result)
    gc.unfreeze()  # or libraries complain at exit about objects that were not collected (Triton 3.9)


def _run(job: Job, channel: Connection[Any, Any]) -> LabResult:
    raise_open_files()  # 200 hosts need more than the usual 1,024
    network = ShapedNetwork(job.description)
    replace_hosts_file({host.name: host.address for host in job.description.hosts})
    if job.python_arguments:
        for name in PRELOADED:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would otherwise touch, and so copy, every page the workers share
    return Supervisor(job, network, channel).run()


if __name__ == "__main__":
    main()
