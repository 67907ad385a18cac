"""Lanes over torch.distributed backends, or over TLS (`tls/backend.py`, which has their methods).

Facts of the backends this rests on (torch 2.8 to 2.13):
- Gloo point-to-point handles cannot be polled: a thread must block in `wait` for each.
- Gloo sends at half duplex unless every receive is posted before the sends.
- Gloo's reduce-scatter sends as much as an all-reduce; a ring of messages sends half of that (`ring.py`), and
  so does an all-to-all plus a sum, which is quicker for small messages.
- Gloo point-to-point with CUDA tensors kills the process, so CUDA is staged through pinned memory.
- NCCL wants the two halves of an exchange grouped, ignores tags, and `wait` only orders streams. It cannot
  receive from whoever comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.errors import PeerDiffers, PeerError, PeerLate, PeerLost, UsageError
from thinwire.traffic import Op
from thinwire.wire.backend import Connected, Pool, Source, has_world, own_pools, pool, start_world
from thinwire.wire.base import Buffer, Peer, Status
from thinwire.wire.presence import Presence
from thinwire.wire.ranges import range_of
from thinwire.wire.ring import RING_BYTES, ring_reduce_scatter
from thinwire.wire.tls.backend import TlsSource
from thinwire.wire.tls.files import Contexts
from thinwire.wire.waiters import Wait, Waiters
from thinwire.wire.watch import Watch
from thinwire.wire.work import Work, after, finished

Issue = Callable[[], Wait]
"""Starts an operation; the result blocks until it is done."""
_SUM = c10d.AllreduceOptions()
_MEET_S = 12.0
"""Time to connect to each other for workers who are all there; one that dies just then is not noticed."""
_LOOK_S = 0.05
_NOTICE_S = 1.0
T = TypeVar("T")


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
        """Of collectives, which all workers issue in one order."""
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

    # -- operations -----------------------------------------------------------------------------

    def collective(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        if self.world_size == 1:
            if out is not data:
                out.copy_(data.view_as(out))
            return finished()
        number = next(self._numbers)

        def issue() -> Wait:
            if data.is_cpu or self._pool.has_nccl:
                backend = self._connected.cpu if data.is_cpu else self._connected.cuda
                return self._issue(op, number, backend, data, out, source)
            x = _pinned_like(data).copy_(data)
            y = x if out is data else _pinned_like(out)
            wait = self._issue(op, number, self._connected.cpu, x, y, source)

            def wait_and_copy() -> None:
                wait()
                out.copy_(y)

            return wait_and_copy

        return self._launch(issue, data)

    def _issue(self, op: Op, number: int, backend: Any, data: Tensor, out: Tensor, source: int) -> Wait:
        handle: Any
        if op == "all_reduce":
            handle = backend.allreduce([data], _SUM)
        elif op == "all_gather":
            handle = backend._allgather_base(out, data, AllgatherOptions())
        elif op == "all_to_all":
            handle = backend.alltoall_base(out, data, [], [], c10d.AllToAllOptions())
        elif op == "broadcast":
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            handle = backend.broadcast([data], options)
        elif backend is not self._connected.cpu:
            handle = backend._reduce_scatter_base(out, data, c10d.ReduceScatterOptions())
        elif data.nbytes >= RING_BYTES:
            return ring_reduce_scatter(backend, number, self.rank, self.world_size, data, out)
        else:
            parts = torch.empty_like(data)
            received = backend.alltoall_base(parts, data, [], [], c10d.AllToAllOptions())

            def wait_and_sum() -> None:
                received.wait()
                torch.sum(parts.view(self.world_size, -1), dim=0, out=out.view(-1))

            return wait_and_sum
        wait: Wait = handle.wait
        return wait

    def exchange(
        self, *, send: Buffer = None, to: Peer = None, recv: Buffer = None, source: Peer = None, tag: int = 0
    ) -> Work:
        example = recv if recv is not None else send
        if example is None or self.world_size == 1:
            return finished()
        issue = self._gloo_exchange if example.is_cpu or not self._pool.has_nccl else self._nccl_exchange
        return self._launch(lambda: issue(send, to, recv, source, tag), example, in_order=False)

    def _gloo_exchange(self, send: Buffer, to: Peer, recv: Buffer, source: Peer, tag: int) -> Wait:
        backend = self._connected.cpu
        inbox = recv if recv is None or not recv.is_cuda else _pinned_like(recv)
        outbox = send if send is None or not send.is_cuda else _pinned_like(send).copy_(send)
        handles = []
        if inbox is not None and source is None:
            handles.append(backend.recv_anysource([inbox], tag))
        elif inbox is not None:
            handles.append(backend.recv([inbox], source, tag))
        if outbox is not None:
            handles.append(backend.send([outbox], to, tag))

        def wait() -> None:
            for handle in handles:
                handle.wait()
            if recv is not None and inbox is not None and inbox is not recv:
                recv.copy_(inbox)

        return wait

    def _nccl_exchange(self, send: Buffer, to: Peer, recv: Buffer, source: Peer, tag: int) -> Wait:
        backend: Any = self._connected.cuda
        if recv is not None and source is None:
            raise UsageError("NCCL cannot receive from whoever comes", hint="use tensors on the CPU")
        backend._start_coalescing()
        if recv is not None:
            backend.recv([recv], source, tag)
        if send is not None:
            backend.send([send], to, tag)
        wait: Wait = backend._end_coalescing().wait
        return wait

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

    def missing(self, landing: int = 0) -> PeerError | None:
        return self._watch.missing(landing)

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
        """In the lane's own thread, so that no worker blocks others by connecting lanes in another order."""
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
        """The backend only knows that a connection broke: find out whose, and tell everyone."""
        if self._error is None:
            self._watch.ring(self._watch.explain(error))


def _pinned_like(data: Tensor) -> Tensor:
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True)


def connect(
    process_group: dist.ProcessGroup | None, timeout_s: float, silence_s: float, tls: Contexts | None = None
) -> ProcessGroupLane | None:
    """The lane over `process_group` (None: the default group, which is started if nobody has yet and a
    launcher has set up a world); None where there is no world to connect to. `tls`: what the payload travels
    by; None: the backends of torch."""
    if process_group is None and not dist.is_initialized():
        if not has_world():
            return None
        start_world()
    base = process_group if process_group is not None else dist.group.WORLD
    assert base is not None
    ranks = dist.get_process_group_ranks(base)
    name = pool.use(ranks)
    presence, watches = Presence(base, f"thinwire/{name}", timeout_s), list[Watch]()

    def meet() -> ProcessGroupLane:
        client = pool.watch_client = pool.watch_client or pool.new_client()
        presence.join()
        if presence.lost is not None:
            raise presence.lost
        rank = ranks.index(dist.get_rank())
        within_s = _MEET_S if presence.complete else max(1.0, presence.left_s)  # or: see who is late
        try:
            watch = Watch(client, name, rank, ranks, within_s, silence_s)
        except PeerLate as error:
            absent = error.rank or 0
            if (dead := presence.first_dead(absent)) != absent:
                raise presence.loss(dead, str(error)) from error
            raise
        watches.append(watch)
        source: Source = pool
        if tls is not None:
            source = TlsSource(PrefixStore(name, client), dist.get_rank(), ranks, tls, within_s)
            own_pools.append(source)
        return _connected_lane(ranks, watch, timeout_s, source)

    return _within(timeout_s + 10, meet, lambda: watches[0].lost if watches else presence.lost)


def connect_members(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    silence_s: float,
    lost: Callable[[], PeerError | None],
    tls: Contexts | None = None,
) -> ProcessGroupLane:
    """The lane between workers that a store of their own joins, all of whom are there now; the error `lost`,
    should there be one before they are connected."""
    ranks, watches = list(range(world_size)), list[Watch]()
    own: Source = Pool(store=store, rank=rank)
    if tls is not None:
        own = TlsSource(store, rank, ranks, tls, _MEET_S)
    own_pools.append(own)

    def meet() -> ProcessGroupLane:
        watch = Watch(store, "members", rank, ranks, _MEET_S, silence_s)
        watches.append(watch)
        return _connected_lane(ranks, watch, timeout_s, own)

    try:
        return _within(_MEET_S + 10, meet, lambda: (watches[0].lost if watches else None) or lost())
    except BaseException:
        own.abort()
        own_pools.remove(own)
        for watch in watches:
            watch.stop()
        raise


def _connected_lane(ranks: Sequence[int], watch: Watch, timeout_s: float, source: Source) -> ProcessGroupLane:
    lane = ProcessGroupLane(ranks, "strategy", watch, timeout_s, source)
    try:
        lane.connect()
    except RuntimeError as error:
        raise watch.explain(error) from error
    except PeerError as error:  # it knows who is behind it, and the others do not
        raise watch.ring(error) from error
    return lane


def _within(timeout_s: float, call: Callable[[], T], lost: Callable[[], PeerError | None]) -> T:
    """The result of a call that may never return, since a client of the store waits for ever for a host that
    is cut off; or the error `lost`, should there be one before."""
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)
        ended.set()

    waiters = Waiters("thinwire-connect", limit=1)
    waiters.submit(run)
    deadline, cause = time.monotonic() + timeout_s, lost()
    while cause is None and not ended.wait(_LOOK_S) and time.monotonic() < deadline:
        cause = lost()
    told_by = time.monotonic() + _NOTICE_S  # a death breaks several connections, one after another
    while errors and cause is None and time.monotonic() < told_by:
        time.sleep(_LOOK_S)
        cause = lost()
    if ended.is_set():
        waiters.stop()
    if results:
        return results[0]
    if errors and isinstance(errors[0], PeerDiffers):  # that others leave because of it says less
        raise errors[0]
    if cause is not None:
        raise cause from (errors[0] if errors else None)
    if errors:
        raise errors[0]
    raise PeerLost(
        f"the store that joins the workers has not answered for {timeout_s:g} s",
        hint="is the host of MASTER_ADDR up, and can it be reached from here?",
    )
