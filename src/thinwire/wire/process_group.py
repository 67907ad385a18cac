"""Lanes over torch.distributed backends.

Facts of the backends this rests on (torch 2.8 to 2.13):
- Gloo point-to-point handles cannot be polled: a thread must block in `wait` for each.
- Gloo sends at half duplex unless every receive is posted before the sends.
- Gloo's reduce-scatter sends as much as an all-reduce; all-to-all plus a sum sends half of that.
- Gloo point-to-point with CUDA tensors kills the process, so CUDA is staged through pinned memory.
- NCCL wants the two halves of an exchange grouped, ignores tags, and `wait` only orders streams. It cannot
  receive from whoever comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d

from thinwire.errors import PeerError, PeerLate, UsageError
from thinwire.wire.backend import Backends, has_nccl, has_world, pool, start_world
from thinwire.wire.ranges import range_of
from thinwire.wire.waiters import Wait, Waiters, blocked
from thinwire.wire.watch import Watch
from thinwire.wire.work import Work, finished

if TYPE_CHECKING:
    from torch import Tensor

Issue = Callable[[], Wait]
"""Starts an operation; the result blocks until it is done."""
_SUM = c10d.AllreduceOptions()


class ProcessGroupLane:
    """One lane: collectives in order, waited for by one thread; exchanges by a thread each.

    It connects in its own thread when it is first used. What is issued until then waits in a backlog.
    """

    def __init__(self, ranks: Sequence[int], name: str, watch: Watch, timeout_s: float) -> None:
        self.rank: int = list(ranks).index(dist.get_rank())
        self.world_size: int = len(ranks)
        self._ranks = list(ranks)
        self._name = name
        self._watch = watch
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._open: set[Work] = set()
        self._error: BaseException | None = None
        self._lanes: dict[tuple[str, tuple[int, ...]], ProcessGroupLane] = {}
        self._backends: tuple[int, Backends] | None = None
        self._backlog: list[Callable[[], None]] | None = None
        """Operations to issue once connected; None while nobody has asked to connect."""
        self._in_order = Waiters(f"thinwire-lane-{name}", limit=1)
        self._any_order = Waiters(f"thinwire-exchange-{name}")
        watch.when_lost(self._end_all)

    @property
    def places(self) -> Sequence[tuple[str, str]]:
        return [self._watch.places[rank] for rank in self._watch_ranks()]

    def _watch_ranks(self) -> list[int]:
        return [self._watch.ranks.index(rank) for rank in self._ranks]

    # -- operations -----------------------------------------------------------------------------

    def all_reduce_(self, data: Tensor) -> Work:
        return self._collective(lambda backend, x, _: backend.allreduce([x], _SUM), data, data)

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        def issue(backend: Any, x: Tensor, y: Tensor) -> Any:
            if not self._is_gloo(backend):
                return backend._reduce_scatter_base(y, x, c10d.ReduceScatterOptions())
            parts = torch.empty_like(x)
            handle = backend.alltoall_base(parts, x, [], [], c10d.AllToAllOptions())
            return _Then(handle, lambda: torch.sum(parts.view(self.world_size, -1), dim=0, out=y.view(-1)))

        return self._collective(issue, data, out)

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        def issue(backend: Any, x: Tensor, y: Tensor) -> Any:
            return backend._allgather_base(y, x, AllgatherOptions())

        return self._collective(issue, data, out)

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        def issue(backend: Any, x: Tensor, y: Tensor) -> Any:
            return backend.alltoall_base(y, x, [], [], c10d.AllToAllOptions())

        return self._collective(issue, data, out)

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._collective(lambda backend, x, _: backend.broadcast([x], options), data, data)

    def exchange(
        self,
        *,
        send: Tensor | None = None,
        to: int | None = None,
        recv: Tensor | None = None,
        source: int | None = None,
        tag: int = 0,
    ) -> Work:
        example = recv if recv is not None else send
        if example is None or self.world_size == 1:
            return finished()
        issue = self._gloo_exchange if self._on_gloo(example) else self._nccl_exchange
        return self._launch(lambda: issue(send, to, recv, source, tag), example, in_order=False)

    def _gloo_exchange(
        self, send: Tensor | None, to: int | None, recv: Tensor | None, source: int | None, tag: int
    ) -> Wait:
        backend = self._connected.cpu
        inbox = recv if recv is None or not recv.is_cuda else _pinned_like(recv)
        outbox = send if send is None or not send.is_cuda else _pinned_like(send).copy_(send)
        handles = []
        if inbox is not None:
            handles.append(
                backend.recv_anysource([inbox], tag) if source is None else backend.recv([inbox], source, tag)
            )
        if outbox is not None:
            handles.append(backend.send([outbox], to, tag))

        def wait() -> None:
            for handle in handles:
                handle.wait()
            if recv is not None and inbox is not None and inbox is not recv:
                recv.copy_(inbox)

        return wait

    def _nccl_exchange(
        self, send: Tensor | None, to: int | None, recv: Tensor | None, source: int | None, tag: int
    ) -> Wait:
        backend: Any = self._connected.cuda
        if recv is not None and source is None:
            raise UsageError("NCCL cannot receive from whoever comes", hint="use tensors on the CPU")
        backend._start_coalescing()
        if recv is not None:
            backend.recv([recv], source, tag)
        if send is not None:
            backend.send([send], to, tag)
        handle = backend._end_coalescing()
        return lambda: _finish(handle)

    # -- lanes and endings ----------------------------------------------------------------------

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> ProcessGroupLane:
        chosen = tuple(self._ranks if ranks is None else (self._ranks[rank] for rank in ranks))
        with self._lock:
            if (name, chosen) not in self._lanes:
                self._lanes[name, chosen] = ProcessGroupLane(
                    chosen, f"{self._name}/{name}", self._watch, self._timeout_s
                )
            return self._lanes[name, chosen]

    def now(self) -> float:
        return time.perf_counter()

    def set_status(self, status: str) -> None:
        self._watch.tell(status)

    def late_error(self, cause: str) -> PeerLate:
        return self._watch.late(cause)

    def abort(self, error: PeerError) -> None:
        self._watch.ring(error)

    def close(self) -> None:
        """Give back threads and the backend. With something under way they are left to end with the
        process: Gloo can neither abort nor destroy such a group without hanging."""
        for lane in self._lanes.values():
            lane.close()
        self._watch.stop()
        if self._error is None and not self._open:
            self._in_order.stop()
            self._any_order.stop()
            if self._backends is not None:
                pool.give_back(self._ranks, self._name, self._timeout_s, *self._backends)
        else:
            blocked.extend([self._in_order, self._any_order])

    # -- how things are started and waited for ---------------------------------------------------

    @property
    def _connected(self) -> Backends:
        assert self._backends is not None, "operations are issued when connected"
        return self._backends[1]

    def connect(self) -> None:
        """Connect now, in the calling thread."""
        self._backends = pool.take(self._ranks, self._name, self._timeout_s)

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

    def _is_gloo(self, backend: object) -> bool:
        return backend is self._connected.cpu

    def _on_gloo(self, data: Tensor) -> bool:
        return data.is_cpu or not has_nccl()

    def _collective(self, issue: Callable[[Any, Tensor, Tensor], Any], data: Tensor, out: Tensor) -> Work:
        if self.world_size == 1:
            if out is not data:
                out.copy_(data.view_as(out))
            return finished()
        if data.is_cpu or not self._on_gloo(data):

            def plain() -> Wait:
                backend = self._connected.cpu if data.is_cpu else self._connected.cuda
                handle = issue(backend, data, out)
                return lambda: _finish(handle)

            return self._launch(plain, data)

        def staged() -> Wait:
            x = _pinned_like(data).copy_(data)
            y = x if out is data else _pinned_like(out)
            handle = issue(self._connected.cpu, x, y)

            def wait() -> None:
                _finish(handle)
                out.copy_(y)

            return wait

        return self._launch(staged, data)

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


class _Then:
    """A handle with something to do after it."""

    def __init__(self, handle: Any, then: Callable[[], object]) -> None:
        self._handle, self._then = handle, then

    def wait(self) -> None:
        self._handle.wait()
        self._then()


def _finish(handle: Any) -> None:
    handle.wait()


def _pinned_like(data: Tensor) -> Tensor:
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True)


def connect(process_group: dist.ProcessGroup | None, timeout_s: float) -> ProcessGroupLane | None:
    """The lane over `process_group` (None: the default group, which is started if nobody has yet and a
    launcher has set up a world); None where there is no world to connect to."""
    if process_group is None and not dist.is_initialized():
        if not has_world():
            return None
        start_world()
    base = process_group if process_group is not None else dist.group.WORLD
    assert base is not None
    ranks = dist.get_process_group_ranks(base)
    name = pool.use(ranks)
    assert pool.watch_client is not None
    watch = Watch(pool.watch_client, name, ranks)
    lane = ProcessGroupLane(ranks, "strategy", watch, timeout_s)
    try:
        lane.connect()
    except RuntimeError as error:
        raise watch.explain(error) from error
    return lane
