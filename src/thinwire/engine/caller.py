"""The calls of a link that all its workers make together, such as a sum over all of them.

They meet in each call and say which it is, so that two that do not match are named. On an elastic link a call
is made again when the workers change in its middle, and whoever is in the loop over steps helps those in a
call (`common_calls.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

from thinwire.engine.common_calls import IN_LOOP, Call, CommonCalls, next_place
from thinwire.engine.core import Core
from thinwire.engine.replicas import Replicas
from thinwire.engine.transport import Transport
from thinwire.errors import PeerLost
from thinwire.strategies.base import overrides

T = TypeVar("T")


class Caller:
    """Makes the common calls of one worker."""

    def __init__(
        self,
        record: CommonCalls,
        *,
        finish_others: Callable[[], None],
        regroup: Callable[[], None] | None,
    ) -> None:
        """`record`: what is remembered of them, also by those who regroup; `finish_others` completes what is
        under way beside training; `regroup`, on an elastic link, goes on with the workers that are left or
        have come."""
        self.record = record
        self._finish_others, self._regroup = finish_others, regroup
        self.in_step = False
        """Whether this worker is inside a `Step`, which is done again as a whole."""

    def enter(self, core: Core, transport: Transport) -> None:
        """Make calls among the workers of this core from now on."""
        self._core, self._transport = core, transport
        self.everyone = Replicas(core.outside, transport.wait)
        self._mixes = overrides(core.strategy, "mix")
        self._meets_to_finish = overrides(core.strategy, "settle") or overrides(core.strategy, "serve")
        """Whether workers must come together to have nothing on the wire."""

    # -- the calls --------------------------------------------------------------------------------

    def total(self, values: Sequence[float]) -> list[float]:
        """Numbers, summed over all workers."""
        what: Call = ["total", f"link.all_reduce of {len(values)} numbers", len(values)]
        return self._make(what, lambda: self._total(what, values))

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, in order of rank."""
        what: Call = ["gather", "link.all_gather_object", 0]
        return self._make(what, lambda: self._gather(what, [value]))

    def distance(self) -> float:
        """How far the workers' models are apart."""
        return self._make(["distance", "link.consensus_distance", 0], self._distance)

    def synchronize(self) -> None:
        """Finish what is under way."""
        if not self._meets_to_finish and not self._mixes:  # then there is nothing to wait for together
            self._synchronize()
        else:
            self._make(["synchronize", "link.synchronize", 0], self._synchronize)

    def average(self) -> None:
        """Overwrite all workers' models with their mean."""
        self._make(["average", "link.average_", 0], self._average)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean model in here, the worker's own again after it."""
        self.synchronize()
        tensors = list(chain(*self._core.averageable().values()))
        own = [t.detach().clone() for t in tensors]
        self.average()
        try:
            yield
        finally:
            self.record.mean_at = -1
            with torch.no_grad():
                for tensor, saved in zip(tensors, own, strict=True):
                    tensor.copy_(saved)

    def finish(self) -> None:
        """End training: nothing is under way, and where a strategy mixes parameters, all have the mean."""
        self._make(["finish", "link.detach", 0], self._finish)

    def meet(self, what: str) -> None:
        """Wait for all workers."""
        self._make(["meet", what, 0], lambda: self.everyone.meet(what))

    # -- what each of them does -------------------------------------------------------------------

    def _total(self, what: Call, values: Sequence[float]) -> list[float]:
        with self._together(what[1]):
            return self.everyone.total(values)

    def _gather(self, what: Call, values: Sequence[Any]) -> list[Any]:
        with self._together(what[1]):
            return [each[0] for each in self.everyone.gather_objects(list(values)) if each]

    def _distance(self) -> float:
        with self._together("link.consensus_distance"):
            # but without the mixer: measuring must not bring exchanges back early
            self._transport.wait_for(self._core.reducer.stepping())
            shared = [group.buckets for group in self._core.groups if group.ranks is None]
            return self.everyone.consensus_distance(list(chain(*shared)))

    def _synchronize(self) -> None:
        with self._together("link.synchronize") if self._meets_to_finish else contextlib.nullcontext():
            self._transport.wait_for(self._core.synchronizing())
            self._finish_others()

    @torch.no_grad()
    def _average(self) -> None:
        with self._together("link.average_"):
            self._synchronize()
            for endpoint, tensors in self._core.averageable().items():
                Replicas(endpoint, self._transport.wait).average_tensors_(tensors)
        self.record.mean_at = self._core.steps

    def _finish(self) -> None:
        with self._together("link.detach"):
            self._synchronize()
            if self._mixes and self.record.mean_at != self._core.steps:
                self._average()

    def _help(self, call: Call) -> Any:
        """Take part in a call of others, with nothing to add."""
        kind, name, size = call
        match kind:
            case "synchronize":
                return self._synchronize()
            case "average":
                return self._average()
            case "finish":
                return self._finish()
            case "distance":
                return self._distance()
            case "total":
                return self._total(call, [0.0] * int(size))
            case "gather":
                return self._gather(call, [])
        with self._together(str(name)):
            return None

    @contextlib.contextmanager
    def _together(self, call: str) -> Iterator[None]:
        """In here all workers are in this call of the user's; whoever is in another one is named."""
        transport = self._transport
        if transport.call:  # as a part of that one
            yield
            return
        transport.call, transport.calls = call, transport.calls + 1
        try:
            self.everyone.meet(call)
            yield
        finally:
            transport.call = ""

    # -- worlds that change -----------------------------------------------------------------------

    def _make(self, what: Call, call: Callable[[], T]) -> T:
        """Make a call; on an elastic link again after each change of the workers, unless it has ended on one
        of them. As a part of a step or another call it is not made again by itself."""
        if self._regroup is None or self.in_step or self._transport.call:
            return call()
        record = self.record
        number = record.done + 1
        while True:
            try:
                self.line_up(what)
                number = record.done + 1
                result = call()
            except PeerLost:
                self._regroup()
                if record.done >= number and record.what == what:
                    found: T = record.result
                    return found
            else:
                record.note(what, result)
                return result

    def line_up(self, mine: Call = IN_LOOP) -> None:
        """While somebody may be at another place of the program, help those in other calls first."""
        record = self.record
        while record.mixed:
            place = next_place(self.everyone.gather_objects(mine))
            record.mixed = place != IN_LOOP
            if place == mine:
                return
            record.note(place, self._help(place))
