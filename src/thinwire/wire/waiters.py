"""Threads that block in a backend until something arrives, and what becomes of them at exit."""

from __future__ import annotations

import ctypes
import queue
import signal
import threading
import weakref
from collections.abc import Callable

Wait = Callable[[], None]
_local = threading.local()


def is_waiter() -> bool:
    """Whether the calling thread waits for a lane's collectives.

    Those of exchanges do not count: there are many, and work that allocates memory is slower when it is
    spread over threads.
    """
    return getattr(_local, "waits", False)


class Waiters:
    """Daemon threads for calls that block: one in order, or as many as there are calls blocked."""

    def __init__(self, name: str, limit: int | None = None) -> None:
        self._name = name
        self._limit = limit
        self._calls: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads: list[threading.Thread] = []
        _all.add(self)

    def submit(self, call: Wait) -> None:
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            elif self._limit is None or len(self._threads) < self._limit:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put(call)

    def _run(self) -> None:
        _local.waits = self._limit == 1
        while (call := self._calls.get()) is not None:
            call()
            with self._lock:
                self._idle += 1

    def stop(self) -> None:
        """End the threads, none of which may be blocked."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()

    def park(self) -> bool:
        """At exit: keep threads that are blocked from ever coming back; gives whether there are any.

        A thread that comes back from a backend while the interpreter shuts down aborts the process. A signal
        handler that waits for another signal holds it where it is, until the process ends.
        """
        with self._lock:
            busy = len(self._threads) > self._idle
        for thread in self._threads if busy else ():
            if thread.is_alive() and thread.ident is not None:
                signal.pthread_kill(thread.ident, _PARKING)
        return busy


_all: weakref.WeakSet[Waiters] = weakref.WeakSet()
_PARKING = signal.SIGURG
"""Of no other use here, and without effect on who has no handler for it."""


def park_all() -> bool:
    """At exit: see `Waiters.park`."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(_PARKING, ctypes.cast(libc.pause, ctypes.c_void_p))
    busy = [waiters for waiters in list(_all) if waiters.park()]
    return bool(busy)
