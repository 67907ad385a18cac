"""Runs a job inside the lab: starts workers, serves their output, makes faults happen; no torch.

One thread and one loop, because workers are forked from this process: forking is safe only without threads.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from dataclasses import astuple

from thinwire.errors import ThinwireError
from thinwire.hosts.faults import Fault, parse_fault
from thinwire.hosts.rates import parse_rate
from thinwire.lab.job import Job, Outcome, WorkerEnd
from thinwire.lab.load import LoadWatch
from thinwire.lab.network import Network
from thinwire.lab.output import Lines
from thinwire.lab.schedule import Event, Schedule
from thinwire.lab.staff import Staff, Worker

TICK_S = 0.01
DRAIN_S = 2.0
"""How long output is awaited after the last worker has ended."""
KILL_AFTER_S = 5.0
"""Between asking workers to end (SIGTERM) and ending them (SIGKILL)."""
TIME_LIMIT_CODE = 124
"""Exit code of a run that reached its time limit, as of timeout(1)."""
INTERRUPTED_CODE = 130
TERMINATED_CODE = 143


class Supervisor:
    """One run of one job."""

    def __init__(self, job: Job, network: Network, channel: socket.socket) -> None:
        self._job = job
        self._network = network
        self._channel = channel
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._parent_spoke)
        self._staff = Staff(job, network.namespaces, self._selector, channel)
        self._schedule = Schedule(job.description.faults)
        self._load = LoadWatch()
        self._training = False
        self._failure: int | None = None
        self._terminate_at_s: float | None = None
        self._kill_at_s: float | None = None
        self._told: list[str] = []
        self._reports: list[object] = []
        self._start_s = time.monotonic()

    def run(self) -> Outcome:
        """Start all workers, stay until the last one has ended, report."""
        for number, code in ((signal.SIGTERM, TERMINATED_CODE), (signal.SIGINT, INTERRUPTED_CODE)):
            signal.signal(number, lambda *_, code=code: self._stop(code))
        if self._job.is_python:
            self._staff.start_store()
        for host in self._job.description.hosts:
            self._staff.start(host.index, self._request)
        self._start_s = time.monotonic()
        while any(worker.alive for worker in self._staff):
            self._serve()
            for worker in self._staff.reap():
                self._ended(worker)
            self._apply_faults()
            self._watch_time()
            self._watch_load()
        self._drain()
        return self._outcome()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _tell(self, words: str) -> None:
        line = f"{self._now_s():.2f} s: {words}"
        self._told.append(line)
        os.write(2, f"[lab] {line}\n".encode())

    # The loop

    def _serve(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            key.data()

    def _parent_spoke(self) -> None:
        if not self._channel.recv(1):
            os._exit(1)  # whoever started us is gone; with us the kernel ends everything in here
        self._stop(INTERRUPTED_CODE)

    def _ended(self, worker: Worker) -> None:
        if worker.exit_code == 0 or worker.scheduled or self._failure is not None:
            return
        self._failure = worker.exit_code
        self._tell(f"host {worker.host} failed with exit code {worker.exit_code}")
        if not self._job.keep_going:
            self._terminate_at_s = time.monotonic() + self._job.grace_s

    def _stop(self, code: int) -> None:
        """End the run early: ask the workers, then insist."""
        self._failure = self._failure or code
        self._terminate_at_s = time.monotonic()

    def _watch_time(self) -> None:
        now_s, limit_s = time.monotonic(), self._job.time_limit_s
        if limit_s is not None and self._now_s() > limit_s and self._terminate_at_s is None:
            self._tell(f"the time limit of {limit_s:g} s is reached")
            self._stop(TIME_LIMIT_CODE)
        if self._terminate_at_s is not None and now_s >= self._terminate_at_s and self._kill_at_s is None:
            self._kill_at_s = now_s + KILL_AFTER_S
            self._staff.signal(signal.SIGTERM)
            self._staff.signal(signal.SIGCONT)  # a paused worker would not hear it
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._staff.signal(signal.SIGKILL)

    def _watch_load(self) -> None:
        if not self._training and any(worker.pace.steps for worker in self._staff):
            self._training = True
            self._load.restart()
        self._load.sample()

    def _drain(self) -> None:
        until_s = time.monotonic() + DRAIN_S
        while Lines.open_in(self._selector) and time.monotonic() < until_s:
            self._serve()

    def _outcome(self) -> Outcome:
        missed = [f"fault {fault} was not reached" for fault in self._schedule.pending]
        warning = self._load.warning()
        return Outcome(
            exit_code=self._failure or 0,
            seconds=self._now_s(),
            workers=tuple(
                WorkerEnd(
                    host=worker.host,
                    exit_code=worker.exit_code or 0,
                    steps=worker.pace.steps,
                    scheduled=worker.scheduled,
                    starts=worker.starts,
                )
                for worker in self._staff
            ),
            counters=tuple(self._network.counters()),
            faults=tuple(self._told),
            warnings=(*missed, warning) if warning else tuple(missed),
            busy_share=self._load.busy_share,
            reports=tuple(self._reports),
        )

    # Faults

    def _apply_faults(self) -> None:
        workers = [self._staff.workers[host.index] for host in self._job.description.hosts]
        steps = [worker.pace.steps for worker in workers]
        for event in self._schedule.due(self._now_s(), steps, [worker.alive for worker in workers]):
            self._apply(event)
            fault = event.fault
            if fault.step is not None and fault.host is not None and not event.ends:
                pace = self._staff.workers[fault.host].pace
                pace.released = max(pace.released, fault.step)

    def _apply(self, event: Event) -> None:
        fault = event.fault
        self._tell(f"end of {fault}" if event.ends else f"{fault}")
        ending = event.ends or fault.kind == "heal"
        touched = ("pause", "slow", "cut") if fault.kind == "heal" else (fault.kind,)
        if "cut" in touched:
            self._network.set_path(host=fault.host, site=fault.site, up=ending)
        if fault.host is None:
            return
        worker = self._staff.workers[fault.host]
        if "slow" in touched:
            speed = self._job.description.hosts[fault.host].speed
            worker.pace.speed = speed if ending else speed * (fault.speed or 1.0)
        if "pause" in touched:
            worker.signal(signal.SIGCONT if ending else signal.SIGSTOP)
        if fault.kind == "kill":
            worker.scheduled = worker.alive
            worker.signal(signal.SIGKILL)
        if fault.kind == "rejoin" and not worker.alive:
            self._staff.start(fault.host, self._request)

    # Requests of workers

    def _request(self, request: dict[str, object]) -> object:
        """Answer one request of a worker; a refusal is an exception."""
        what, host = request.get("do"), request.get("host")
        if what == "rate":
            chosen = None if host is None else [self._known_host(host)]
            self._network.set_rate(parse_rate(str(request["rate"])), hosts=chosen)
        elif what == "uplink":
            self._network.set_uplink(parse_rate(str(request["rate"]), field="uplink"))
        elif what == "fault":
            self._apply_now(parse_fault(f"{request['fault']},after=0"))
        elif what == "counters":
            return [astuple(counters) for counters in self._network.counters()]
        elif what == "report":
            self._reports.append(request["value"])
        elif what == "restart_load":
            self._load.restart()
        elif what == "load":
            return [self._load.busy_share, self._load.warning()]
        else:
            raise ThinwireError(f"unknown request {what!r}")
        return None

    def _apply_now(self, fault: Fault) -> None:
        if fault.host is not None:
            self._known_host(fault.host)
        self._schedule.begun(fault, self._now_s())
        self._apply(Event(fault))

    def _known_host(self, host: object) -> int:
        if not isinstance(host, int) or host not in self._staff.workers:
            raise ThinwireError(f"unknown host {host!r}")
        return host
