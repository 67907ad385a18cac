"""Mixing of parameters that runs beside training: started after a step, brought back before a later one.

Nothing here waits: each method yields what has to be waited for, one after another, and the shell waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.driver import Driver, Task
from thinwire.wire.work import Work


@dataclass(slots=True)
class _Pending:
    task: Task
    step: int
    """After which it was started."""
    since: int
    """Steps done when it left the training thread."""


class Mixer:
    """Keeps each strategy's promise of when its `mix` is back (see `in_background`)."""

    def __init__(
        self,
        buckets: Sequence[ParameterBucket],
        start: Callable[[ParameterBucket], Task],
        driver: Driver,
        now: Callable[[], float],
    ) -> None:
        self._buckets = buckets
        self._start = start
        self._driver = driver
        self._now = now
        self._pending: list[_Pending] = []

    def starting(self, steps_done: int) -> Iterator[Work]:
        """After a step: start mixing, and wait for what stays in the training thread."""
        tasks = [self._start(bucket) for bucket in self._buckets]
        for task in tasks:
            yield task.left
            if not task.done():
                self._pending.append(_Pending(task, steps_done, steps_done))
            elif task.error is not None:  # it has left, and failed before we looked
                raise task.error

    def bringing_back(self, steps_done: int) -> Iterator[Work]:
        """Before a step: bring back what is there and due, and wait for what may not be late."""
        upcoming = steps_done + 1
        for pending in list(self._pending):
            task, promise = pending.task, pending.task.promise
            assert promise is not None, "a mix that never left was waited for when it started"
            due = pending.since + promise.due
            if upcoming >= due and (task.returning.done() or upcoming >= due + promise.slack):
                yield from self._bringing_back_task(task)
                pending.since = steps_done
                if task.done():
                    self._pending.remove(pending)

    @property
    def newest_step(self) -> int:
        """The last step whose mixing is not back yet; 0: none."""
        return max((pending.step for pending in self._pending), default=0)

    def completing_all(self) -> Iterator[Work]:
        """Bring everything back, whenever it was due; no other worker has to."""
        for pending in self._pending:
            yield from self.completing(pending.task)
        self._pending.clear()

    def completing(self, task: Task) -> Iterator[Work]:
        """Wait for the end of a task, however often it leaves the training thread."""
        yield task.left
        while not task.done():
            yield from self._bringing_back_task(task)
        if task.error is not None:
            raise task.error

    def abandon(self) -> None:
        for pending in self._pending:
            pending.task.coroutine.close()
        self._pending.clear()

    def _bringing_back_task(self, task: Task) -> Iterator[Work]:
        waited_s = 0.0
        if not task.returning.done():
            began_s = self._now()
            yield task.returning
            waited_s = self._now() - began_s
        self._driver.bring_back(task, waited_s)
        yield task.left
        if task.error is not None:
            raise task.error
