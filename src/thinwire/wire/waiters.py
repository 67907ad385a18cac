"""Threads that block in a backend until something arrives, and what becomes of them at exit."""

from __future__ import annotations

import math
import queue
import threading
import time
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

    def __init__(self, name: str, limit: float = math.inf) -> None:
        self._name = name
        self._limit = limit
        self._calls: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open = 0
        """Calls that have not ended."""
        self._threads: list[threading.Thread] = []
        _all.add(self)

    def submit(self, call: Wait) -> None:
        with self._lock:
            self._open += 1
            if len(self._threads) < min(self._open, self._limit):
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._calls.put(call)

    def _run(self) -> None:
        _local.waits = self._limit == 1
        while (call := self._calls.get()) is not None:
            call()
            with self._lock:
                self._open -= 1

    def stop(self, deadline: float | None = None) -> bool:
        """End the threads; False if some are still blocked at `deadline`."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


_all: weakref.WeakSet[Waiters] = weakref.WeakSet()


def stop_all(timeout_s: float) -> bool:
    """At exit: a thread that comes back from a backend when the interpreter shuts down aborts the process."""
    deadline = time.monotonic() + timeout_s
    return all([waiters.stop(deadline) for waiters in list(_all)])  # noqa: C419  # every one of them
