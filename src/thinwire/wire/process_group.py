"""Lanes over torch.distributed backends, or over TLS (`tls/backend.py`, which has their methods).

Facts of the backends this rests on (torch 2.8 to 2.13):
- Gloo point-to-point handles cannot be polled: a thread must block in `wait` for each.
- Gloo sends at half duplex unless every receive is posted before the sends.
- Gloo's reduce-scatter sends as much as an all-reduce; a ring of messages sends half of that (`ring.py`), and
  so does an all-to-all plus a sum, which is quicker for small messages.
- Gloo point-to-point with CUDA tensors kills the process, so CUDA is staged through pinned memory.
- A Gloo receive from whoever comes does not end when a worker dies, nor when its own sockets are shut down:
  it blocks its thread until the time-out. One from a given worker ends within milliseconds.
- NCCL wants the two halves of an exchange grouped, ignores tags, and `wait` only orders streams. It cannot
  receive from whoever comes either.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor

from thinwire.errors import PeerError, PeerLate
from thinwire.traffic import Op
from thinwire.wire import operations
from thinwire.wire.backend import Connected, Source, own_pools, pool
from thinwire.wire.base import Buffer, Peer, Status
from thinwire.wire.operations import Issue, pinned_like
from thinwire.wire.ranges import range_of
from thinwire.wire.waiters import Wait, Waiters
from thinwire.wire.watch import Watch
from thinwire.wire.work import Work, after, finished

_NOTICE_S = 1.0


class ProcessGroupLane:
    """One lane: collectives in order, waited for by one thread; exchanges by a thread each.

    It connects in its own thread when it is first used. What is issued until then waits in a backlog.
    """

    def __init__(
        self, ranks: Sequence[int], name: str, watch: Watch, timeout_s: float, pool: Source = pool
    ) -> None:
        self.rank: int = list(ranks).index(pool.own_rank)
        self.world_size: int = len(ranks)
        self._ranks = list(ranks)
        self._name = name
        self._watch = watch
        self._timeout_s = timeout_s
        self._pool = pool
        self._lock = threading.RLock()
        self._open: set[Work] = set()
        self._numbers = count()
        """Numbers of collectives, which all workers issue in one order."""
        self._error: BaseException | None = None
        self._lanes: dict[tuple[str, tuple[int, ...]], ProcessGroupLane] = {}
        self._backends: Connected | None = None
        self._backlog: list[Callable[[], None]] | None = None
        """Operations to issue once connected; None while nobody has asked to connect."""
        self._in_order = Waiters(f"thinwire-lane-{name}", limit=1)
        self._any_order = Waiters(f"thinwire-exchange-{name}")
        watch.when_lost(self._end_all)

    @property
    def places(self) -> Sequence[tuple[str, str]]:
        return [self._watch.places[self._watch.ranks.index(rank)] for rank in self._ranks]

    @property
    def listens_to(self) -> Sequence[Peer]:
        if self._pool.hears_anyone:
            return [None]
        return [rank for rank in range(self.world_size) if rank != self.rank]

    # -- operations -----------------------------------------------------------------------------

    def collective(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        if self.world_size == 1:
            if out is not data:
                out.copy_(data.view_as(out))
            return finished()
        number = next(self._numbers)

        def start(data: Tensor, out: Tensor) -> Wait:
            on_cpu = data.is_cpu
            backend = self._connected.cpu if on_cpu else self._connected.cuda
            place = {"number": number, "rank": self.rank, "world_size": self.world_size}
            return operations.collective(backend, op, data, out, source=source, by_ring=on_cpu, **place)

        def issue() -> Wait:
            if data.is_cpu or self._pool.has_nccl:
                return start(data, out)
            x = pinned_like(data).copy_(data)
            y = x if out is data else pinned_like(out)
            wait = start(x, y)

            def wait_and_copy() -> None:
                wait()
                out.copy_(y)

            return wait_and_copy

        return self._launch(issue, data)

    def exchange(
        self, *, send: Buffer = None, to: Peer = None, recv: Buffer = None, source: Peer = None, tag: int = 0
    ) -> Work:
        example = recv if recv is not None else send
        if example is None or self.world_size == 1:
            return finished()
        by_gloo = example.is_cpu or not self._pool.has_nccl

        def issue() -> Wait:
            if by_gloo:
                return operations.gloo_exchange(self._connected.cpu, send, to, recv, source, tag)
            return operations.nccl_exchange(self._connected.cuda, send, to, recv, source, tag)

        return self._launch(issue, example, in_order=False)

    # -- lanes and endings ----------------------------------------------------------------------

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> ProcessGroupLane:
        chosen = tuple(self._ranks if ranks is None else (self._ranks[rank] for rank in ranks))
        with self._lock:
            if (name, chosen) not in self._lanes:
                full_name = f"{self._name}/{name}"
                lane = ProcessGroupLane(chosen, full_name, self._watch, self._timeout_s, self._pool)
                self._lanes[name, chosen] = lane
            return self._lanes[name, chosen]

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> Work:
        return after(seconds)

    def set_status(self, status: Status) -> None:
        self._watch.tell(status)

    @property
    def lost(self) -> BaseException | None:
        return self._error

    @property
    def known_steps(self) -> list[int]:
        """Steps that each worker has last said to have done, in order of rank."""
        return self._watch.known_steps

    def missing(self, awaited_step: int = 0) -> PeerError | None:
        return self._watch.missing(awaited_step)

    def late_error(self, cause: str) -> PeerLate:
        return self._watch.late(cause)

    def abort(self, error: PeerError) -> BaseException:
        return self._watch.ring(error)

    def close(self) -> None:
        """Give back threads and the backend; after an error, end what is still under way."""
        for lane in self._lanes.values():
            lane.close()
        self._watch.stop()
        if self._error is None and not self._open:
            self._in_order.stop()
            self._any_order.stop()
            if self._backends is not None:
                self._pool.give_back(self._backends)
            if self._pool in own_pools:
                own_pools.remove(self._pool)
        elif self._backends is not None:
            self._backends.abort()

    def drop(self, error: PeerError) -> None:
        """End the world of this lane for good: what is under way fails, threads and connections are gone.

        For a pool of its own; a thread that does not come back keeps its backend.
        """
        self._watch.ring(error)
        for lane in list(self._lanes.values()):
            lane.drop(error)
        self._watch.stop()
        if self._backends is not None:
            self._backends.abort()
        deadline = time.monotonic() + _NOTICE_S
        stopped = [waiters.stop(deadline) for waiters in (self._in_order, self._any_order)]
        if all(stopped):
            self._backends = None
        if self._pool in own_pools:
            own_pools.remove(self._pool)
            self._pool.clear()

    # -- how things are started and waited for ---------------------------------------------------

    @property
    def _connected(self) -> Connected:
        assert self._backends is not None, "operations are issued when connected"
        return self._backends

    def connect(self) -> None:
        """Connect now, in the calling thread."""
        self._backends = self._pool.take(self._ranks, self._name, self._timeout_s)

    def _connect_later(self) -> None:
        """Connect in the lane's thread: no worker may block others by connecting lanes in another order."""
        try:
            self.connect()
        except RuntimeError as error:
            self._blame(error)
            return
        with self._lock:
            backlog, self._backlog = self._backlog or [], None
            for issue in backlog:
                issue()

    def _launch(self, issue: Issue, data: Tensor, *, in_order: bool = True) -> Work:
        work = Work()
        threads = self._in_order if in_order else self._any_order
        ready = None if data.is_cpu else torch.cuda.current_stream(data.device).record_event()

        def start() -> None:
            if ready is not None:
                threads.submit(lambda: self._settle_cuda(work, issue, data.device, ready))
                return
            try:
                wait = issue()
            except RuntimeError as error:
                threads.submit(lambda error=error: self._blame(error))  # type: ignore[misc]  # mypy: lambda default
                return
            threads.submit(lambda: self._settle(work, wait))

        with self._lock:
            if self._error is not None:
                work.fail(self._error)
                return work
            self._open.add(work)
            if self._backends is not None and self._backlog is None:
                start()
            elif self._backlog is None:
                self._backlog = [start]
                self._in_order.submit(self._connect_later)
            else:
                self._backlog.append(start)
        return work

    def _settle_cuda(self, work: Work, issue: Issue, device: torch.device, ready: torch.cuda.Event) -> None:
        """Issue and wait on a stream of this thread, so that the training stream is never blocked."""
        with torch.cuda.stream(torch.cuda.Stream(device)) as _:
            ready.synchronize()

            def wait() -> None:
                issue()()
                torch.cuda.current_stream(device).synchronize()

            self._settle(work, wait)

    def _settle(self, work: Work, wait: Wait) -> None:
        try:
            with range_of("wire"):
                wait()
        except RuntimeError as error:
            self._blame(error)
            return
        with self._lock:
            self._open.discard(work)
        work.finish()

    def _end_all(self, error: PeerError) -> None:
        with self._lock:
            self._error = self._error or error
            works, self._open = self._open, set()
        for work in works:
            work.fail(error)

    def _blame(self, error: RuntimeError) -> None:
        """Find out whose connection broke, which the backend does not know, and tell everyone."""
        if self._error is None:
            self._watch.ring(self._watch.explain(error))
