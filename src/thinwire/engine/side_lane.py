"""Something else that talks to the same workers beside training, such as the shuffle ring."""

from __future__ import annotations

from collections.abc import Callable

from thinwire.engine.driver import Driver, ProgressThread, Task
from thinwire.engine.endpoint import Endpoint, Make
from thinwire.wire.base import Lane
from thinwire.wire.wire import Meter


class SideLane:
    """A lane and a thread of its own, so that it holds up no strategy and no strategy it."""

    def __init__(self, lane: Lane, meter: Meter, name: str, finish: Callable[[], None]) -> None:
        self.rank, self.world_size = lane.rank, lane.world_size
        self.finish = finish
        """Called where everything under way has to end: before a save, at `detach`."""
        self._name = name
        self._endpoint = Endpoint(lane, meter)
        self._progress = ProgressThread(f"thinwire-{name}")
        self._driver = Driver(self._progress.soon, self._progress.soon)

    def start(self, make: Make) -> Task:
        """Run a coroutine here until it first has to wait; it goes on in the thread."""
        return self._endpoint.start(self._driver, "reduce", make, self._name)

    def stop(self) -> None:
        self._progress.stop()
