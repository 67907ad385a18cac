"""Threads that block in a backend until something arrives, and what becomes of them at exit."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
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

    def stop(self, timeout_s: float | None = None) -> bool:
        """End the threads; False if some are still blocked after `timeout_s`."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)


blocked: list[Waiters] = []
"""Those that a lost peer has left blocked."""


def _at_exit() -> None:
    """A thread that comes back from a backend while the interpreter shuts down aborts the process.

    So wait for them before that begins; if they do not come back although everyone stops now, the
    process has to end without shutting down.
    """
    stopped = [waiters.stop(timeout_s=1.0) for waiters in blocked]
    if not all(stopped):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_at_exit)  # at import, so that it runs after what others register later
