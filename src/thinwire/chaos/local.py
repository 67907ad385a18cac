"""Workers of one elastic world as processes of this machine, and faults that need no root.

A worker is killed, stands still (SIGSTOP), or gets a part of the time (short stops, again and again).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.chaos.journals import Journals
from thinwire.chaos.outcome import Ended, Outcome, Struck
from thinwire.elastic.journal import VARIABLE
from thinwire.elastic.keys import write_key
from thinwire.errors import UsageError, check
from thinwire.hosts.description import Fault

TICK_S = 0.02
LOOK_S = 0.1
"""Time between two looks into the journals."""
BURST_S = 0.1
"""Period of a slow worker: it stands still for a part of each."""
_HINT = "does the script call thinwire.attach(..., elastic=True) and loop with link.each_step?"


@dataclass(slots=True)
class _Slow:
    until_s: float
    speed: float
    stopped: bool = False


@dataclass(slots=True)
class _Worker:
    host: int
    process: subprocess.Popen[bytes]
    killed: bool = False
    frozen_until_s: float = 0.0
    slow: _Slow | None = None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass(slots=True)
class LocalRun:
    """One script on several processes, until all have ended."""

    command: Sequence[str]
    workers: int
    folder: Path
    faults: list[Fault]
    environment: Mapping[str, str] = field(default_factory=dict)
    time_limit_s: float = 600.0
    _workers: list[_Worker] = field(default_factory=list)
    _struck: list[Struck] = field(default_factory=list)
    _ends: list[tuple[float, Fault]] = field(default_factory=list)
    _journals: Journals = field(init=False)

    def __post_init__(self) -> None:
        for fault in self.faults:
            check(fault.kind != "cut" and fault.site is None, "fault", "without cuts outside the lab", fault)
            check((fault.host or 0) < self.workers, "fault host", f"below {self.workers}", fault.host)
        (self.folder / "journals").mkdir(parents=True, exist_ok=True)
        self._journals = Journals(self.folder / "journals")

    def run(self) -> Outcome:
        began = time.time()
        write_key(self.folder / "run.key")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        pending = list(self.faults)
        try:
            for host in range(self.workers):
                self._start(host, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            self._follow(pending, began)
        finally:
            late = [worker for worker in self._workers if worker.alive]
            for worker in late:
                worker.signal(signal.SIGKILL)
                worker.process.wait()
        self._journals.poll()
        if not any(any(each.of("trains")) for each in self._journals.workers):
            raise UsageError(
                f"no worker has trained in an elastic world; their output is in {self.folder}", hint=_HINT
            )
        outcome = Outcome(self.folder, self._journals, began, self._struck, not_reached=pending)
        outcome.ended = [
            Ended(each.host, None if each in late else _as_shell(each.process.returncode), each.killed)
            for each in self._workers
        ]
        outcome.seconds = time.time() - began
        return outcome

    # -- inside -------------------------------------------------------------------------------------

    def _start(self, host: int, place: Mapping[str, str]) -> None:
        number = sum(each.host == host for each in self._workers)
        given = {
            "RANK": str(host),
            "WORLD_SIZE": str(self.workers),
            "LOCAL_RANK": "0",
            "THINWIRE_KEY_FILE": str(self.folder / "run.key"),
            VARIABLE: str(self.folder / "journals"),
            "PYTHONUNBUFFERED": "1",
        }
        env = {"OMP_NUM_THREADS": "1", **os.environ, **self.environment, **given, **place}
        name = f"worker-{host}.log" if not number else f"worker-{host}-{number + 1}.log"
        with (self.folder / name).open("wb") as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        self._workers.append(_Worker(host, process))

    def _follow(self, pending: list[Fault], began: float) -> None:
        trains_s, look_s = None, 0.0
        while any(each.alive for each in self._workers):
            now_s = time.monotonic()
            if time.time() - began > self.time_limit_s:
                return
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                self._journals.poll()
                if trains_s is None and self._all_train():
                    trains_s = now_s
            if trains_s is not None:
                for fault in [each for each in pending if self._is_due(each, now_s - trains_s)]:
                    pending.remove(fault)
                    self._apply(fault, now_s)
            self._keep_slow(now_s)
            time.sleep(TICK_S)

    def _all_train(self) -> bool:
        return all(any(self._steps_of(host)) for host in range(self.workers))

    def _steps_of(self, host: int) -> list[int]:
        return [each.steps for each in self._journals.of_host(host)]

    def _is_due(self, fault: Fault, now_s: float) -> bool:
        if fault.after_s is not None:
            return now_s >= fault.after_s
        assert fault.step is not None
        assert fault.host is not None
        alive = any(each.host == fault.host and each.alive for each in self._workers)
        hosts = [fault.host] if alive else range(self.workers)
        return max(sum(self._steps_of(host)) for host in hosts) >= fault.step

    def _apply(self, fault: Fault, now_s: float) -> None:
        assert fault.host is not None
        worker = next((w for w in reversed(self._workers) if w.host == fault.host), None)
        assert worker is not None
        until_s = now_s + (fault.seconds if fault.seconds is not None else self.time_limit_s)
        if fault.kind == "rejoin":
            if not worker.alive:
                self._struck.append(Struck(time.time(), fault))
                self._start(fault.host, {"THINWIRE_JOIN": ",".join(self._addresses())})
            return
        if not worker.alive:
            return
        self._struck.append(Struck(time.time(), fault))
        if fault.kind == "kill":
            worker.killed = True
            worker.signal(signal.SIGKILL)
        elif fault.kind == "pause":
            worker.frozen_until_s = until_s
            worker.signal(signal.SIGSTOP)
        elif fault.kind == "slow":
            worker.slow = _Slow(until_s, fault.speed or 1.0)
        elif fault.kind == "heal":
            worker.frozen_until_s, worker.slow = 0.0, None
            worker.signal(signal.SIGCONT)

    def _addresses(self) -> list[str]:
        """Addresses of the live workers: a restarted worker joins by any of them."""
        pids = {each.process.pid for each in self._workers if each.alive}
        return [each.address for each in self._journals.workers if each.pid in pids]

    def _keep_slow(self, now_s: float) -> None:
        for worker in self._workers:
            if worker.frozen_until_s:
                if now_s >= worker.frozen_until_s:
                    worker.frozen_until_s = 0.0
                    worker.signal(signal.SIGCONT)
            elif worker.slow is not None:
                slow = worker.slow
                over = now_s >= slow.until_s
                stops = not over and now_s % BURST_S < BURST_S * (1 - slow.speed)
                if stops != slow.stopped or over:
                    slow.stopped = stops
                    worker.signal(signal.SIGSTOP if stops else signal.SIGCONT)
                if over:
                    worker.slow = None


def _as_shell(code: int) -> int:
    return code if code >= 0 else 128 - code


def python_command(script: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a script, or `-m module`, with this interpreter."""
    if script == "-m":
        check(bool(arguments), "script", "given a module after -m", "-m")
        return [sys.executable, "-m", *arguments]
    check(Path(script).is_file(), "script", "a file that exists", script)
    return [sys.executable, script, *arguments]
