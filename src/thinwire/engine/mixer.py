"""Exchanges of parameters in the air: launched after a step, landed before a later one.

Nothing here waits: each method yields what has to be waited for, one after another, and the link waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.driver import Driver, Task
from thinwire.wire.base import Work


@dataclass(slots=True)
class _Flight:
    task: Task
    launched: int
    """Steps done when it took off."""


class Mixer:
    """Keeps each strategy's promise of when its `mix` is back (see `take_off`)."""

    def __init__(
        self,
        buckets: Sequence[ParameterBucket],
        start: Callable[[ParameterBucket], Task],
        settle: Callable[[], Task] | None,
        driver: Driver,
        now: Callable[[], float],
    ) -> None:
        self._buckets = buckets
        self._start = start
        self._settle = settle
        self._driver = driver
        self._now = now
        self._flights: list[_Flight] = []

    def launching(self, steps_done: int) -> Iterator[Work]:
        """After a step: start mixing, and wait for what does not take off."""
        tasks = [self._start(bucket) for bucket in self._buckets]
        for task in tasks:
            yield task.aloft
            if not task.done():
                self._flights.append(_Flight(task, steps_done))

    def landing(self, steps_done: int) -> Iterator[Work]:
        """Before a step: land what has arrived and is due, and wait for what may not be late."""
        upcoming = steps_done + 1
        for flight in list(self._flights):
            promise = flight.task.flight
            assert promise is not None, "a mix that never took off was waited for when it started"
            due = flight.launched + promise.after
            arrived = flight.task.landing.done()
            if upcoming >= due and (arrived or upcoming >= due + promise.late):
                yield from self._touching_down(flight.task)
                self._flights.remove(flight)

    def landing_all(self) -> Iterator[Work]:
        """Land everything, whenever it was due; no other worker has to."""
        for flight in self._flights:
            yield from self._touching_down(flight.task)
            yield flight.task
        self._flights.clear()

    def finishing(self) -> Iterator[Work]:
        """Land everything, and have the strategy take the rest off the wire, together with all workers."""
        yield from self.landing_all()
        if self._settle is not None:
            task = self._settle()
            yield from self._touching_down(task)
            yield task

    def abandon(self) -> None:
        for flight in self._flights:
            flight.task.coroutine.close()

    def _touching_down(self, task: Task) -> Iterator[Work]:
        waited_s = 0.0
        if not task.landing.done():
            began_s = self._now()
            yield task.landing
            waited_s = self._now() - began_s
        self._driver.touch_down(task, waited_s)
        if task.error is not None:
            raise task.error
