"""Lanes for what is sent beside training, such as the samples of a shuffle ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from thinwire.engine.core import Core
from thinwire.engine.driver import Driver, ProgressThread, Task
from thinwire.engine.endpoint import Make
from thinwire.wire.base import Lane


@dataclass(frozen=True, slots=True)
class _SideLane:
    finish: Callable[[], None]
    """Completes what is under way."""
    progress: ProgressThread


class SideLanes:
    """The side lanes of one link, each with a thread of its own."""

    def __init__(self) -> None:
        self._lanes: list[_SideLane] = []

    def open(self, core: Core, name: str, finish: Callable[[], None]) -> tuple[Lane, Callable[[Make], Task]]:
        """Open a lane; returns it, and a function that starts coroutines on it. All workers open theirs in
        one order."""
        number, progress = len(self._lanes), ProgressThread(f"thinwire-{name}")
        self._lanes.append(_SideLane(finish, progress))
        return core.side_lane(f"{name} {number}", Driver(progress.soon, progress.soon))

    def finish(self) -> None:
        """Complete what is under way on each of them."""
        for lane in self._lanes:
            lane.finish()

    def stop(self) -> None:
        """End their threads."""
        for lane in self._lanes:
            lane.progress.stop()
