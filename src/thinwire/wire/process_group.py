"""The wire over a torch.distributed process group; the only file that names a backend.

A lane is a process group of its own, so nothing here mixes with the user's own collectives.
Facts of the backends this rests on (torch 2.8 to 2.13):
- Gloo point-to-point handles cannot be polled: a thread must block in `wait` for each.
- Gloo sends at half duplex unless every receive is posted before the sends.
- Gloo's reduce-scatter sends as much as an all-reduce; all-to-all plus a sum sends half of that.
- Gloo point-to-point with CUDA tensors kills the process, so CUDA is staged through pinned memory.
- NCCL wants the two halves of an exchange grouped, ignores tags, and `wait` only orders streams. It cannot
  receive from whoever comes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from thinwire.errors import PeerError, PeerLate, UsageError
from thinwire.wire.base import Work, finished
from thinwire.wire.groups import pool
from thinwire.wire.ranges import range_of
from thinwire.wire.waiters import Wait, Waiters, blocked
from thinwire.wire.watch import Watch

if TYPE_CHECKING:
    from torch import Tensor

# torch 2.13 renamed these two
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Issue = Callable[[], Wait]


class ProcessGroupWire:
    """One lane: collectives in order, waited for by one thread; exchanges by a thread each."""

    def __init__(self, group: dist.ProcessGroup, watch: Watch, timeout_s: float) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self._group = group
        self._watch = watch
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open: set[Work] = set()
        self._error: BaseException | None = None
        self._lanes: list[ProcessGroupWire] = []
        self._in_order = Waiters(f"thinwire-lane-{group.group_name}", limit=1)
        self._any_order = Waiters(f"thinwire-exchange-{group.group_name}")
        watch.when_lost(self._end_all)

    # -- operations -----------------------------------------------------------------------------

    def all_reduce_(self, data: Tensor) -> Work:
        return self._collective(
            lambda x, _: _started(dist.all_reduce(x, group=self._group, async_op=True)), data, data
        )

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        if not self._over_gloo(data):
            return self._collective(
                lambda x, y: _started(_reduce_scatter(y, x, group=self._group, async_op=True)),
                data,
                out,
            )

        def issue(x: Tensor, y: Tensor) -> Wait:
            parts = torch.empty_like(x)
            arrived = _started(dist.all_to_all_single(parts, x, group=self._group, async_op=True))

            def wait() -> None:
                arrived()
                torch.sum(parts.view(self.world_size, -1), dim=0, out=y.view(-1))

            return wait

        return self._collective(issue, data, out)

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        return self._collective(
            lambda x, y: _started(_all_gather(y, x, group=self._group, async_op=True)),
            data,
            out,
        )

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        return self._collective(
            lambda x, y: _started(dist.all_to_all_single(y, x, group=self._group, async_op=True)), data, out
        )

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        return self._collective(
            lambda x, _: _started(dist.broadcast(x, group=self._group, group_src=source, async_op=True)),
            data,
            data,
        )

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
        if example is None:
            return finished()
        if not self._over_gloo(example):
            operations = []
            if recv is not None:
                if source is None:
                    raise UsageError("NCCL cannot receive from whoever comes", hint="use tensors on the CPU")
                operations.append(dist.P2POp(dist.irecv, recv, group=self._group, group_peer=source))
            if send is not None:
                operations.append(dist.P2POp(dist.isend, send, group=self._group, group_peer=to))
            return self._launch(lambda: _all_started(dist.batch_isend_irecv(operations)), example)

        def issue() -> Wait:
            inbox = recv if recv is None or not recv.is_cuda else _pinned_like(recv)
            outbox = send if send is None or not send.is_cuda else _pinned_like(send).copy_(send)
            handles = []
            if inbox is not None:
                handles.append(dist.irecv(inbox, group=self._group, group_src=source, tag=tag))
            if outbox is not None:
                handles.append(dist.isend(outbox, group=self._group, group_dst=to, tag=tag))
            arrived = _all_started(handles)

            def wait() -> None:
                arrived()
                if recv is not None and inbox is not None and inbox is not recv:
                    recv.copy_(inbox)

            return wait

        return self._launch(issue, example, in_order=False)

    # -- lanes and endings ----------------------------------------------------------------------

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> ProcessGroupWire:
        members = dist.get_process_group_ranks(self._group)
        chosen = members if ranks is None else [members[rank] for rank in ranks]
        group = pool.take(chosen, self._timeout_s, name)
        lane = ProcessGroupWire(group, self._watch, self._timeout_s)
        self._lanes.append(lane)
        return lane

    def now(self) -> float:
        return time.perf_counter()

    def tell(self, status: str) -> None:
        self._watch.tell(status)

    def late(self, cause: str) -> PeerLate:
        return self._watch.late(cause)

    def fail(self, error: PeerError) -> None:
        self._watch.ring(error)

    def close(self) -> None:
        """Give back threads and the group. With something under way they are left to end with the
        process: Gloo can neither abort nor destroy such a group without hanging."""
        for lane in self._lanes:
            lane.close()
        self._watch.stop()
        if self._error is None and not self._open:
            self._in_order.stop()
            self._any_order.stop()
            pool.give_back(self._group, self._timeout_s)
        else:
            blocked.extend([self._in_order, self._any_order])

    # -- how things are started and waited for ---------------------------------------------------

    def _over_gloo(self, data: Tensor) -> bool:
        backend = self._group._get_backend(data.device if data.is_cpu else torch.device("cpu"))
        return backend.name() == "gloo" and (data.is_cpu or not _has_nccl(self._group))

    def _collective(self, issue: Callable[[Tensor, Tensor], Wait], data: Tensor, out: Tensor) -> Work:
        if not (data.is_cuda and self._over_gloo(data)):
            return self._launch(lambda: issue(data, out), data)

        def staged() -> Wait:
            x = _pinned_like(data).copy_(data)
            y = x if out is data else _pinned_like(out)
            arrived = issue(x, y)

            def wait() -> None:
                arrived()
                out.copy_(y)

            return wait

        return self._launch(staged, data)

    def _launch(self, issue: Issue, data: Tensor, *, in_order: bool = True) -> Work:
        work = Work()
        if self.world_size == 1:
            # torch runs a group of one without the wire; the result is still its own business
            issue()()
            work.finish()
            return work
        with self._lock:
            if self._error is not None:
                work.fail(self._error)
                return work
            self._open.add(work)
        threads = self._in_order if in_order else self._any_order
        if data.is_cpu:
            try:
                wait = issue()
            except RuntimeError as error:
                self._blame(error)
                return work
            threads.submit(lambda: self._settle(work, wait))
        else:
            ready = torch.cuda.current_stream(data.device).record_event()
            threads.submit(lambda: self._settle_cuda(work, issue, data.device, ready))
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


def _started(handle: dist.Work | None) -> Wait:
    assert handle is not None, "an asynchronous operation gave no handle"
    return lambda: _finish(handle)


def _all_started(handles: Sequence[dist.Work | None]) -> Wait:
    waits = [_started(handle) for handle in handles]

    def wait() -> None:
        for each in waits:
            each()

    return wait


def _finish(handle: dist.Work) -> None:
    handle.wait()


def _pinned_like(data: Tensor) -> Tensor:
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True)


def _has_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in dist.get_backend_config(group)


def _backend() -> str:
    """NCCL where every worker of this machine has a GPU of its own: it refuses to share one."""
    workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if dist.is_nccl_available() and workers_here <= torch.cuda.device_count():
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def connect(process_group: dist.ProcessGroup | None, timeout_s: float) -> ProcessGroupWire | None:
    """The wire over `process_group` (None: the default group, which is started under torchrun if
    nobody has yet); None where there is no world to connect to."""
    if process_group is None and not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            return None
        pool.start_world(_backend())
    base = process_group if process_group is not None else dist.group.WORLD
    assert base is not None
    group = pool.take(dist.get_process_group_ranks(base), timeout_s, "strategy")
    store = dist.distributed_c10d._get_default_store()
    watch = Watch(store, pool.use(group), dist.get_rank(group), dist.get_world_size(group))
    return ProcessGroupWire(group, watch, timeout_s)
