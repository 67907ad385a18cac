"""A driver steps a strategy's coroutines: in the training thread, beside it, or on a clock."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from thinwire.errors import UsageError
from thinwire.wire.ranges import range_of
from thinwire.wire.waiters import is_waiter
from thinwire.wire.work import AnyOf, InBackground, TrainingThread, Work, finished

Call = Callable[[], None]
Soon = Callable[[Call], None]
_NEVER_THERE = finished()
"""For tasks that begin beside training: nothing has to wait until they leave it."""


class Task(Work):
    """A coroutine under way."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], name: str, *, in_training: bool) -> None:
        super().__init__()
        self.coroutine = coroutine
        self.name = name
        self.in_training = in_training
        """Whether it goes on in the training thread after a wait, or beside it."""
        self.keeps_promises = in_training
        """Whether training brings it back when it is due; others come back as soon as training has time."""
        self.promise: InBackground | None = None
        """When training wants it back; None unless it has left the training thread."""
        self.left = Work() if in_training else _NEVER_THERE
        """Ends when the task leaves the training thread, or ends."""
        self.returning = Work() if in_training else _NEVER_THERE
        """Ends when the task wants to come back as promised, or ends."""
        self.waits_for = "to start"

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        self.left._end(error)
        self.returning._end(error)


class Driver:
    """Steps coroutines. Calls given to `background` and `training` run later, in one thread each."""

    def __init__(self, background: Soon, training: Soon) -> None:
        self._background = background
        self._training = training

    def start(
        self, coroutine: Coroutine[Any, Any, object], name: str = "", *, in_training: bool = False
    ) -> Task:
        """Run the coroutine here until it first has to wait."""
        task = Task(coroutine, name, in_training=in_training)
        self._step(task, None)
        return task

    def bring_back(self, task: Task, waited_s: float = 0.0) -> None:
        """Go on, in the calling training thread, with a task that comes back as promised."""
        if not task.done():
            assert task.waits_for == "for the training thread", f"{task.name} waits {task.waits_for}"
            self._enter_training(task, waited_s)

    def _enter_training(self, task: Task, waited_s: float) -> None:
        task.in_training, task.promise = True, None
        task.left, task.returning = Work(), Work()
        self._step(task, waited_s)

    def _step(self, task: Task, value: object) -> None:
        while True:
            try:
                awaited = task.coroutine.send(value)
            except StopIteration:
                task.finish()
                return
            except BaseException as error:  # noqa: BLE001  # it is raised in whoever waits
                task.fail(error)
                return
            value = None
            if isinstance(awaited, Work) and awaited.done():
                continue
            if isinstance(awaited, TrainingThread) and task.in_training:
                value = 0.0
                continue
            self._park(task, awaited)
            return

    def _resume(self, task: Task, value: object = None) -> None:
        soon = self._training if task.in_training else self._background
        soon(lambda: self._step(task, value))

    def _park(self, task: Task, awaited: object) -> None:
        if isinstance(awaited, Work):
            task.waits_for = "for the wire"
            awaited.when_done(lambda: self._resume(task))
        elif isinstance(awaited, InBackground):
            task.in_training, task.promise = False, awaited if task.keeps_promises else None
            task.waits_for = "to go on"
            self._resume(task)
            task.left.finish()
        elif isinstance(awaited, TrainingThread):
            task.waits_for = "for the training thread"
            if task.promise is None:
                self._training(lambda: self._enter_training(task, 0.0))
            else:
                task.returning.finish()
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
                self._resume(task, index)

        for index, work in enumerate(awaited.works):
            work.when_done(lambda index=index: ended(index))  # type: ignore[misc]  # mypy: lambda default


class ProgressThread:
    """The thread beside the training loop in which coroutines go on.

    A thread that has waited for the wire goes on with its coroutine itself, if nobody else runs one at that
    moment: handing over to another thread takes longer than most of what there is to do.
    """

    def __init__(self, name: str) -> None:
        self._calls: deque[Call] = deque()
        self._running = threading.Lock()
        """Held by the thread that runs calls, which may be any but the training thread."""
        self._wanted = threading.Semaphore(0)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def soon(self, call: Call) -> None:
        """Run a call beside training, after those given before it."""
        self._calls.append(call)
        if is_waiter():
            self._drain()
        else:
            self._wanted.release()

    def _drain(self) -> None:
        # Whoever fails to get the lock leaves its call to the holder, which looks again after giving it back.
        while self._calls and not self._stopped and self._running.acquire(blocking=False):
            try:
                with range_of("progress"):
                    while self._calls and not self._stopped:
                        self._calls.popleft()()
            finally:
                self._running.release()

    def _run(self) -> None:
        while not self._stopped:
            self._wanted.acquire()
            self._drain()

    def stop(self) -> None:
        """Return when nothing runs here any more."""
        self._stopped = True
        self._wanted.release()
        self._thread.join()
        with self._running:  # another thread may be in the middle of a call
            pass


class TrainingQueue:
    """Calls for the training thread, which runs them whenever it waits for something."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.soon: Soon = self._calls.put

    def run(self) -> None:
        """Run what is there."""
        while not self._calls.empty():
            if (call := self._calls.get()) is not None:
                call()

    def run_until(self, work: Work, timeout_s: float) -> bool:
        """Run what comes until `work` has ended; False if `timeout_s` ran out first."""
        work.when_done(lambda: self._calls.put(None))
        deadline = time.monotonic() + timeout_s
        while not work.done():
            try:
                call = self._calls.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            if call is not None:
                call()
        return True
