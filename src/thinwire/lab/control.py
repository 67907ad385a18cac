"""A worker's connections to the lab: a socket for requests, and memory that both share; no torch.

Each worker inherits one end of a pipe; a request is a dictionary, its answer a value or an error. The lab
writes the speed of the host into the memory, the worker its steps: visible at once, without locks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError, UsageError
from thinwire.lab.network import Counters

# Environment variables of every worker: the number of the open pipe, and the path of the shared memory.
CONTROL_VARIABLE = "THINWIRE_LAB_CONTROL"
STATUS_VARIABLE = "THINWIRE_LAB_STATUS"

TIMEOUT_S = 30.0
MAX_STOP_S = 10.0
"""Longest time that a worker waits for a fault scheduled at its step."""


class Control:
    """Sends requests to the lab that this worker runs in; use it from one thread at a time."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    @staticmethod
    def from_environment() -> Control | None:
        """Return the connection of this worker; None outside a lab."""
        number = os.environ.get(CONTROL_VARIABLE, "")
        return Control(Connection(os.dup(int(number)))) if number else None

    def set_rate(self, bit_per_s: float, *, host: int | None = None) -> None:
        """Shape the path of one host, or of all."""
        self._request(do="rate", bit_per_s=float(bit_per_s), host=host)

    def fault(self, text: str) -> None:
        """Cause a fault now: `cut:host=3`, without a step or a time."""
        self._request(do="fault", fault=text)

    def report(self, value: Any) -> None:
        """Send a result (any JSON value) to the caller of the run, who finds it in `LabResult.reports`."""
        self._request(do="report", value=value)

    def counters(self) -> list[Counters]:
        """Return bytes and packets of every host so far."""
        counters: list[Counters] = self._request(do="counters")
        return counters

    def uplinks(self) -> list[Counters]:
        """Return bytes and packets between every site and the others so far; empty with one site."""
        counters: list[Counters] = self._request(do="uplinks")
        return counters

    def restart_load(self) -> None:
        """Measure the processor load from now on."""
        self._request(do="restart_load")

    def load(self) -> tuple[float, str | None]:
        """Return the busy share of the processors since the last restart, and a warning if it is too high."""
        share, warning = self._request(do="load")
        return share, warning

    def _request(self, **request: Any) -> Any:
        try:
            self._connection.send(request)
            if not self._connection.poll(TIMEOUT_S):
                raise UsageError(f"the lab has not answered {request['do']} for {TIMEOUT_S:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as problem:
            raise UsageError("the lab is gone") from problem
        if isinstance(answer, ThinwireError):
            raise UsageError(f"the lab refused {request['do']}: {answer}")
        return answer


class HostStatus(ctypes.Structure):
    """Shared memory of the lab and one worker; assigning to a field writes to it."""

    _fields_ = (("speed", ctypes.c_double), ("steps", ctypes.c_int64), ("released", ctypes.c_int64))
    speed: float
    """1 is full speed, 0.5 takes twice as long."""
    steps: int
    """Optimizer steps that the worker has done."""
    released: int
    """The last step at which a scheduled fault was applied: a worker that waits there continues."""

    @classmethod
    def create(cls, file: int, *, speed: float = 1.0) -> HostStatus:
        """Map an open file and reset it, also when an earlier worker of the host has used it."""
        os.ftruncate(file, ctypes.sizeof(cls))
        status = cls.from_buffer(mmap.mmap(file, ctypes.sizeof(cls)))
        status.speed, status.steps, status.released = speed, 0, 0
        return status

    @classmethod
    def from_environment(cls) -> HostStatus | None:
        """Return the status of this worker's host; None outside a lab."""
        path = os.environ.get(STATUS_VARIABLE, "")
        if not path or not Path(path).exists():
            return None
        with open(path, "r+b") as file:
            return cls.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(cls)))


class StepCounter:
    """Optimizer hook that counts steps, waits at scheduled faults, and slows down a slow host."""

    def __init__(
        self,
        status: HostStatus,
        stops: set[int],
        *,
        used_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._status, self._stops, self._used_s, self._sleep = status, stops, used_s, sleep
        self._counted: weakref.ref[Any] | None = None
        self._before_s = used_s()

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        counted = self._counted and self._counted()
        if counted is None:
            self._counted = weakref.ref(optimizer)
        elif counted is not optimizer:
            return  # of an outer optimizer, say, beside the one that is counted
        # Only this thread's processor time is stretched: waiting for peers is not computing, and an
        # emulated accelerator, which sleeps, slows itself down.
        if self._status.speed < 1:
            self._sleep((self._used_s() - self._before_s) * (1 / self._status.speed - 1))
        self._status.steps = steps = self._status.steps + 1
        if steps in self._stops:
            waited_s = 0.0
            while self._status.released < steps and waited_s < MAX_STOP_S:
                self._sleep(0.001)
                waited_s += 0.001
        self._before_s = self._used_s()
