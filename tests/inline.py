"""Coroutines stepped by the thread that calls, so that tests need no other and depend on no timing."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine
from typing import Any

from thinwire.engine.driver import Call, Driver
from thinwire.errors import UsageError


class Inline:
    """Coroutines of many workers stepped in turn by the calling thread: no thread, no timing."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self.driver = Driver(self._calls.append, self._calls.append)

    def settle(self) -> None:
        """Go on until everything waits for something else than its turn."""
        while self._calls:
            self._calls.popleft()()

    def run(self, *coroutines: Coroutine[Any, Any, object]) -> None:
        """Run coroutines to their end, bringing each back as soon as it asks; a deadlock is named."""
        tasks = [self.driver.start(c, f"coroutine {i}") for i, c in enumerate(coroutines)]
        self.settle()
        while waiting := [t for t in tasks if t.promise is not None and t.returning.done() and not t.done()]:
            for task in waiting:
                self.driver.bring_back(task)
            self.settle()
        stuck = [f"{t.name} waits {t.waits_for}" for t in tasks if not t.done()]
        if stuck:
            raise UsageError("deadlock: " + "; ".join(stuck))
        for task in tasks:
            task.wait()
