"""The threads of a link: what runs beside training, and how the training thread waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from thinwire.engine.buckets import TrainingContext
from thinwire.engine.driver import Driver, ProgressThread, TrainingQueue
from thinwire.engine.endpoint import Endpoint
from thinwire.errors import PeerError, PeerLost
from thinwire.wire.base import Lane
from thinwire.wire.ranges import range_of
from thinwire.wire.work import Work

if TYPE_CHECKING:
    from thinwire.engine.core import Core, Order


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
        """Run the training thread's calls until `work` ends; name who is late if it takes too long."""
        if work.done() and work.error is None:
            return
        began = time.perf_counter()
        self.set_status("waiting")
        try:
            with range_of("wait"):
                arrived = self._training.run_until(work, self.timeout_s)
            if not arrived:
                error = self._lane.late_error(f"worker {self._lane.rank} has waited {self.timeout_s:g} s")
                self._lane.abort(error)  # which ends the work too, with the cause that was told first
                raise work.error or error
            if work.error is not None:
                raise work.error
        finally:
            if self.core is not None:
                self.core.exposed_s += time.perf_counter() - began
        self.set_status()

    def set_status(self, doing: str = "") -> None:
        """Tell the others, should they ask why this worker is late."""
        steps = 0 if self.core is None else self.core.steps
        self._lane.set_status(f"step {steps}, {doing}" if doing else f"step {steps}")

    # -- leaving --------------------------------------------------------------------------------------

    def leave_together(self, engine: Endpoint) -> None:
        """Nobody closes its connections while others still talk."""
        everyone = engine.issue(lambda wire: wire.all_reduce_(torch.zeros(1)))
        self.set_status("detaching")
        if not everyone.wait(self.timeout_s):
            raise self._lane.late_error(
                f"worker {self._lane.rank} has waited {self.timeout_s:g} s for the others to detach"
            )

    def tell_error(self, error: BaseException) -> None:
        """Tell the others of an error of this worker, so that they need not wait to find out."""
        if isinstance(error, PeerError):
            return
        rank, host = self._lane.rank, socket.gethostname()
        steps = 0 if self.core is None else self.core.steps
        cause = f"{type(error).__name__}: {error}".strip().rstrip(":")
        self._lane.abort(
            PeerLost(
                f"worker {rank} on {host} left at step {steps} with {cause}",
                rank=rank,
                host=host,
                hint="see that worker's own output",
            )
        )

    def stop(self) -> None:
        """End the thread: a coroutine cannot be closed while it runs there."""
        self._progress.stop()
