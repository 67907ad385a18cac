"""How a link talks: its wires, the thread that drives them, waiting for others, and leaving."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import torch

from thinwire.engine import replicas
from thinwire.engine.driver import Driver, ProgressThread, Task
from thinwire.errors import PeerError, PeerLost
from thinwire.traffic import Traffic
from thinwire.wire.base import Wire, Work
from thinwire.wire.metered import Meter, MeteredWire
from thinwire.wire.ranges import range_of


class Talk:
    """Of one worker with the others: on one lane the strategy, on another the engine itself."""

    def __init__(self, wire: Wire, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.meter, self._engine_meter = Meter(), Meter()
        """Of what the strategy sends, and of the rest."""
        self.wire = MeteredWire(wire, self.meter)
        self.engine = MeteredWire(wire.lane("engine"), self._engine_meter)
        self.steps = 0
        """Optimizer steps of this worker, which it tells the others."""
        self.exposed_s = 0.0
        """Seconds the training thread has waited."""
        self._progress: ProgressThread | None = None

    @property
    def traffic(self) -> Traffic:
        return self.meter.traffic + self._engine_meter.traffic

    @property
    def rounds(self) -> int:
        return self.meter.rounds + self._engine_meter.rounds

    # -- the thread ---------------------------------------------------------------------------------

    def open(self) -> None:
        """From now on coroutines are driven."""
        self._progress = ProgressThread("thinwire-progress")

    @property
    def driver(self) -> Driver:
        return self._thread.driver

    def start(self, coroutine: Coroutine[Any, Any, None], name: str) -> Task:
        return self.driver.start(coroutine, name)

    def soon(self, call: Callable[[], None]) -> None:
        self._thread.soon(call)

    @property
    def _thread(self) -> ProgressThread:
        assert self._progress is not None, "opened before it is used"
        return self._progress

    # -- waiting --------------------------------------------------------------------------------------

    def wait(self, work: Work) -> None:
        """Wait on an event of ours, never inside a backend, and say who is late if it takes too long."""
        if work.done() and work.error is None:
            return
        began = time.perf_counter()
        self.tell("waiting")
        try:
            with range_of("wait"):
                arrived = work.wait(self.timeout_s)
            if not arrived:
                error = self.wire.late(f"worker {self.wire.rank} has waited {self.timeout_s:g} s")
                self.wire.fail(error)  # which ends the work too, with the cause that was told first
                raise work.error or error
        finally:
            self.exposed_s += time.perf_counter() - began
        self.tell()

    def wait_for(self, works: Iterable[Work]) -> None:
        """One after another: what comes next may depend on the one before."""
        for work in works:
            self.wait(work)

    def tell(self, doing: str = "") -> None:
        """The others, should they ask why this worker is late."""
        self.wire.tell(f"step {self.steps}, {doing}" if doing else f"step {self.steps}")

    # -- what all workers say together ----------------------------------------------------------------

    def sum(self, values: Sequence[float]) -> list[float]:
        """Over all workers."""
        total = torch.tensor(values, dtype=torch.float64)
        self.wait(self.engine.all_reduce_(total))
        return [float(value) for value in total]

    def gather_texts(self, text: str) -> list[str]:
        """Every worker's text, in order of rank."""
        return replicas.gather_texts(text, self.engine, self.wait)

    def agree(self, order: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Rank 0's order, on every worker."""
        data = torch.tensor(order)
        self.wait(self.engine.broadcast_(data, source=0))
        return [(int(bucket), int(piece)) for bucket, piece in data.tolist()]

    # -- leaving --------------------------------------------------------------------------------------

    def leave_together(self) -> None:
        """Nobody closes its connections while others still talk."""
        everyone = self.engine.all_reduce_(torch.zeros(1))
        self.tell("detaching")
        if not everyone.wait(self.timeout_s):
            raise self.wire.late(
                f"worker {self.wire.rank} has waited {self.timeout_s:g} s for the others to detach"
            )

    def say_why(self, error: BaseException) -> None:
        """Tell the others of an error of this worker, so that they need not wait to find out."""
        if isinstance(error, PeerError):
            return
        rank, host = self.wire.rank, socket.gethostname()
        cause = f"{type(error).__name__}: {error}".strip().rstrip(":")
        self.wire.fail(
            PeerLost(
                f"worker {rank} on {host} left at step {self.steps} with {cause}",
                rank=rank,
                host=host,
                hint="see that worker's own output",
            )
        )

    def stop(self) -> None:
        """The thread; a coroutine cannot be closed while it runs there."""
        self._thread.stop()

    def close(self) -> None:
        self.wire.close()
