"""The threads of a link: what runs beside training, and how the training thread waits."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from thinwire.engine.buckets import TrainingContext
from thinwire.engine.driver import Driver, ProgressThread, TrainingQueue
from thinwire.errors import PeerError, PeerLost
from thinwire.strategies.base import overrides
from thinwire.wire.base import DETACHING, FAILING, IN_CALL, WAITING, Lane, Status
from thinwire.wire.ranges import range_of
from thinwire.wire.work import Work

if TYPE_CHECKING:
    from thinwire.engine.core import Core, Order

logger = logging.getLogger(__name__)
LOOK_S = 1.0
"""While waiting, look so often whether somebody will never come."""
TELL_S = 60.0
"""After so long, say once for whom this worker waits."""
FAILED_S = 5.0
"""So long a worker that leaves with an error waits for the others to leave too."""


class Transport:
    """Waits for works of one worker, on events of ours and never inside a backend."""

    def __init__(self, lane: Lane, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.context = TrainingContext()
        self._lane = lane
        self._training = TrainingQueue()
        self._progress = ProgressThread("thinwire-progress")
        self.driver = Driver(self._progress.soon, self._training.soon)
        self.core: Core | None = None
        self.call = ""
        """The method of the link that a user is in, if any."""
        self.calls = 0
        """Such methods that all workers call, begun so far."""
        self.passes = 0
        """Backward passes that send, and steps, begun since the last step was done."""
        self._leaving = ""
        self._failure: BaseException | None = None

    # -- the core's shell -----------------------------------------------------------------------------

    def wait_for(self, works: Iterable[Work]) -> None:
        self.enter()
        for work in works:
            self.wait(work)

    def background(self, call: Callable[[], None]) -> None:
        self._progress.soon(call)

    def agree(self, order: Order) -> Order:
        assert self.core is not None
        data = torch.tensor(order)
        self.wait(self.core.engine.issue(lambda wire: wire.broadcast_(data, source=0)))
        return [(int(bucket), int(piece)) for bucket, piece in data.tolist()]

    # -- waiting --------------------------------------------------------------------------------------

    def enter(self) -> None:
        """This is the training thread: run what wants to run here."""
        self.context.thread = threading.get_ident()
        self._training.run()

    def wait(self, work: Work) -> None:
        """Run the training thread's calls until `work` ends; name who is late if it takes too long, and who
        will never come as soon as that is known."""
        if work.done() and work.error is None:
            return
        began = time.perf_counter()
        self.set_status(f"{IN_CALL}{self.call}" if self.call else self._waiting)
        try:
            with range_of("wait"):
                self._wait(work)
            if work.error is not None:
                raise work.error
        finally:
            if self.core is not None:
                self.core.exposed_s += time.perf_counter() - began
        self.set_status()

    def _wait(self, work: Work) -> None:
        deadline, told_at = time.monotonic() + self.timeout_s, time.monotonic() + TELL_S
        while not self._training.run_until(work, min(LOOK_S, max(0.0, deadline - time.monotonic()))):
            error = self._lane.missing(0 if self.core is None else self.core.awaited_step)
            if error is None and time.monotonic() >= deadline:
                error = self._lane.late_error(f"worker {self._lane.rank} has waited {self.timeout_s:g} s")
            if error is not None and self._failure is not None:
                self.tell_error(self._failure)
                raise error
            if error is not None:
                raise self._lane.abort(error)
            if time.monotonic() >= told_at:
                told_at = math.inf
                logger.warning(
                    self._lane.late_error(f"worker {self._lane.rank} waits for {TELL_S:g} s").message
                )

    @property
    def _waiting(self) -> str:
        """In a step, strategies that answer messages wait for nobody but their own thread."""
        return "" if self.core is not None and overrides(self.core.strategy, "serve") else WAITING

    @property
    def _steps(self) -> int:
        return 0 if self.core is None else self.core.steps

    def set_status(self, doing: str = "") -> None:
        """Tell the others, should they ask why this worker is late."""
        self._lane.set_status(Status(self._steps, self.passes, self.calls, self._leaving or doing))

    # -- leaving --------------------------------------------------------------------------------------

    def leave(self, failure: BaseException | None) -> None:
        """From now on this worker makes no step any more. With a failure the others may not come: then they
        are told of it soon."""
        self._leaving, self._failure = DETACHING, failure
        if failure is not None:
            self._leaving = FAILING + _text(failure)
            self.timeout_s = min(self.timeout_s, FAILED_S)
        self.set_status()

    def tell_error(self, error: BaseException) -> None:
        """Tell the others of an error of this worker, so that they need not wait to find out."""
        if isinstance(error, PeerError):
            return
        rank, host = self._lane.rank, socket.gethostname()
        self._lane.abort(
            PeerLost(
                f"worker {rank} on {host} left at step {self._steps} with {_text(error)}",
                rank=rank,
                host=host,
                hint="see that worker's own output",
            )
        )

    def stop(self) -> None:
        """End the thread: a coroutine cannot be closed while it runs there."""
        self._progress.stop()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().rstrip(":")
