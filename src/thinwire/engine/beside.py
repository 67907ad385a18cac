"""What else talks to the same workers beside training, such as the shuffle ring."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from thinwire.engine.driver import ProgressThread, Task
from thinwire.wire.base import Wire


class Beside:
    """A lane and a thread of its own, so that it holds up no strategy and no strategy it."""

    def __init__(self, wire: Wire, name: str, settle: Callable[[], None]) -> None:
        self.wire = wire
        self.settle = settle
        """Called where everything under way has to end: before a save, at `detach`."""
        self._name = name
        self._progress = ProgressThread(f"thinwire-{name}")

    def start(self, coroutine: Coroutine[Any, Any, None]) -> Task:
        """Run a coroutine here until it first has to wait; it goes on in the thread."""
        return self._progress.driver.start(coroutine, self._name)

    def stop(self) -> None:
        self._progress.stop()
