"""Exchanges of parameters in the air: launched after a step, landed before a later one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        wait: Callable[[Work], None],
        driver: Driver,
        now: Callable[[], float],
    ) -> None:
        self._buckets = buckets
        self._start = start
        self._wait = wait
        self._driver = driver
        self._now = now
        self._flights: list[_Flight] = []

    def launch(self, steps_done: int) -> None:
        """After a step: start mixing, and wait for what does not take off."""
        tasks = [self._start(bucket) for bucket in self._buckets]
        for task in tasks:
            self._wait(task.aloft)
            if not task.done():
                self._flights.append(_Flight(task, steps_done))

    def land(self, steps_done: int) -> None:
        """Before a step: land what has arrived and is due, and wait for what may not be late."""
        upcoming = steps_done + 1
        for flight in list(self._flights):
            promise = flight.task.flight
            assert promise is not None, "a mix that never took off was waited for when it started"
            due = flight.launched + promise.after
            arrived = flight.task.landing.done()
            if upcoming >= due and (arrived or upcoming >= due + promise.late):
                self._touch_down(flight)
                self._flights.remove(flight)

    def finish(self) -> None:
        """Land everything, whenever it was due."""
        for flight in self._flights:
            self._touch_down(flight)
            self._wait(flight.task)
        self._flights.clear()

    def abandon(self) -> None:
        for flight in self._flights:
            flight.task.coroutine.close()

    def _touch_down(self, flight: _Flight) -> None:
        waited_s = 0.0
        if not flight.task.landing.done():
            began_s = self._now()
            self._wait(flight.task.landing)
            waited_s = self._now() - began_s
        self._driver.touch_down(flight.task, waited_s)
        if flight.task.error is not None:
            raise flight.task.error
