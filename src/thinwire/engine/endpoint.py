"""One worker's end of a lane: gives every coroutine a wire of its own, in one order on all workers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from torch import Tensor

from thinwire.engine.driver import Driver, Task
from thinwire.strategies.base import Seam
from thinwire.wire.base import Lane
from thinwire.wire.messages import Messenger
from thinwire.wire.sequencer import Sequencer, Ticket
from thinwire.wire.wire import Meter, Wire
from thinwire.wire.work import Work

Make = Callable[[Wire], Coroutine[Any, Any, None]]
"""A coroutine that is still to be given its wire."""


class Endpoint:
    """Coroutines of one seam are ordered among each other; those of different seams are independent."""

    def __init__(self, lane: Lane, meter: Meter) -> None:
        self.lane = lane
        self.messenger = Messenger(lane, meter)
        self._meter = meter
        self._sequencers = {"reduce": Sequencer(lane, "reduce", first=lane)}

    def start(
        self, driver: Driver, seam: Seam, make: Make, name: str = "", *, in_training: bool = False
    ) -> Task:
        """Run a coroutine until it first has to wait; its collectives follow those started before it."""
        sequencer = self._sequencer(seam)
        ticket = sequencer.enter()
        wire = Wire(self.lane, sequencer, ticket, self._meter, self.messenger)
        task = driver.start(make(wire), name or seam, in_training=in_training)

        def leave() -> None:
            if task.error is None:  # else others wait for its collectives, and later ones must not go instead
                sequencer.leave(ticket)

        task.when_done(leave)
        return task

    def issue(self, call: Callable[[Wire], Work]) -> Work:
        """One operation, outside a coroutine."""
        sequencer = self._sequencer("reduce")
        ticket = sequencer.enter()
        try:
            return call(Wire(self.lane, sequencer, ticket, self._meter, self.messenger))
        finally:
            sequencer.leave(ticket)

    def gather(self, data: Tensor) -> tuple[Work, Tensor]:
        """Gather every worker's flat tensor of one size, in order of rank; it is there when the work ends."""
        everyones = data.new_empty(self.lane.world_size * data.numel())
        return self.issue(lambda wire: wire.all_gather(data, everyones)), everyones

    def wire(self) -> Wire:
        """A wire to look at before anything is sent."""
        sequencer = self._sequencer("mix")
        return Wire(self.lane, sequencer, Ticket(-1, ended=True), self._meter, self.messenger)

    def _sequencer(self, seam: Seam) -> Sequencer:
        if seam not in self._sequencers:
            self._sequencers[seam] = Sequencer(self.lane, seam)
        return self._sequencers[seam]
