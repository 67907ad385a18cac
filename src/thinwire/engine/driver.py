"""Drivers step a strategy's coroutines: beside the training loop, or inline in tests."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from thinwire.errors import UsageError
from thinwire.wire.base import AnyOf, Land, TakeOff, Work
from thinwire.wire.ranges import range_of

Call = Callable[[], None]


class Task(Work):
    """A coroutine under way."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], name: str) -> None:
        super().__init__()
        self.coroutine = coroutine
        self.name = name
        self.flight: TakeOff | None = None
        """When training wants it back; None while it has not taken off."""
        self.aloft = Work()
        """Ends when the task takes off, or ends without."""
        self.landing = Work()
        """Ends when the task waits to land, or ends without."""
        self.waits_for = "to start"

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        for stage in (self.aloft, self.landing):
            stage.fail(error) if error else stage.finish()


class Driver:
    """Steps coroutines; `soon` runs a call later, in the one thread that goes on with them."""

    def __init__(self, soon: Callable[[Call], None]) -> None:
        self._soon = soon

    def start(self, coroutine: Coroutine[Any, Any, object], name: str = "") -> Task:
        """Run the coroutine here until it first has to wait; from then on `soon` goes on with it."""
        task = Task(coroutine, name)
        self._step(task, None)
        return task

    def touch_down(self, task: Task, waited_s: float = 0.0) -> None:
        """Go on, in the calling thread, with a task that waits to land and was waited for that long."""
        if not task.done():
            assert task.waits_for == "to land", f"{task.name} waits {task.waits_for}"
            self._step(task, waited_s)

    def _step(self, task: Task, value: object) -> None:
        while True:
            try:
                awaited = task.coroutine.send(value)
            except StopIteration:
                task.finish()
                return
            except BaseException as error:  # noqa: BLE001 (it is raised in whoever waits)
                task.fail(error)
                return
            value = None
            if isinstance(awaited, Work) and awaited.done():
                continue
            self._park(task, awaited)
            return

    def _park(self, task: Task, awaited: object) -> None:
        if isinstance(awaited, Work):
            task.waits_for = "for the wire"
            awaited.when_done(lambda: self._soon(lambda: self._step(task, None)))
        elif isinstance(awaited, TakeOff):
            task.flight = awaited
            task.waits_for = "to go on"
            self._soon(lambda: self._step(task, None))
            task.aloft.finish()
        elif isinstance(awaited, Land):
            task.waits_for = "to land"
            task.landing.finish()
        elif isinstance(awaited, AnyOf):
            task.waits_for = "for one of several peers"
            self._park_any(task, awaited)
        else:
            task.coroutine.close()
            task.fail(UsageError(f"a strategy awaited {awaited!r}, which no driver knows"))

    def _park_any(self, task: Task, awaited: AnyOf) -> None:
        first = threading.Lock()  # taken by the first work that ends; the others find it taken

        def ended(index: int) -> None:
            if first.acquire(blocking=False):
                self._soon(lambda: self._step(task, index))

        for index, work in enumerate(awaited.works):
            work.when_done(lambda index=index: ended(index))  # type: ignore[misc]  # mypy: lambda default


class ProgressThread:
    """The thread beside the training loop in which coroutines go on."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.soon: Callable[[Call], None] = self._calls.put
        self.driver = Driver(self.soon)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            with range_of("progress"):
                call()

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()


class Inline:
    """Coroutines of many workers stepped in turn by the calling thread: no thread, no timing."""

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self.driver = Driver(self._calls.append)

    def settle(self) -> None:
        """Go on until everything waits for something else than its turn."""
        while self._calls:
            self._calls.popleft()()

    def run(self, *coroutines: Coroutine[Any, Any, object]) -> None:
        """Run coroutines to their end, landing each as soon as it asks; a deadlock is named."""
        tasks = [self.driver.start(c, f"coroutine {i}") for i, c in enumerate(coroutines)]
        self.settle()
        while waiting := [t for t in tasks if t.waits_for == "to land" and not t.done()]:
            for task in waiting:
                self.driver.touch_down(task)
            self.settle()
        stuck = [f"{t.name} waits {t.waits_for}" for t in tasks if not t.done()]
        if stuck:
            raise UsageError("deadlock: " + "; ".join(stuck))
        for task in tasks:
            task.wait()
