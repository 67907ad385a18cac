"""A whole world inside one process: workers are threads (or turns of one thread), messages are copies.

Sums are taken in order of rank, so they are the same bits on every run. Operations that do not
match across workers raise PeerDiffers, where a backend would mix numbers or hang.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from thinwire.errors import PeerError
from thinwire.wire.base import Work, finished
from thinwire.wire.local import LocalWire, Meeting
from thinwire.wire.settle import settle

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.traffic import Op


class _Exchange(Work):
    """Both halves of an exchange; ends with the later one."""

    def __init__(self, halves: int) -> None:
        super().__init__()
        self.halves = halves

    def half(self) -> None:
        """One half is done; called under the lock of the channel, and `end` after it."""
        self.halves -= 1

    def end(self) -> None:
        if self.halves == 0:
            self.finish()


@dataclass(slots=True, eq=False)
class _Receive:
    source: int | None
    """None: from whoever sends first."""
    recv: Tensor
    work: _Exchange


class _Channel:
    """What the workers of one lane share."""

    def __init__(self, world_size: int) -> None:
        self.lock = threading.RLock()
        self.world_size = world_size
        self.meetings: dict[int, Meeting] = {}
        # by receiver and tag, in the order they came; a message with its sender
        self.messages: defaultdict[tuple[int, int], deque[tuple[int, Tensor]]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int], deque[_Receive]] = defaultdict(deque)
        self.open: set[Work] = set()


class ThreadWorld:
    """The shared memory of `world_size` workers; hand `wire(rank)` to each.

    A message arrives at once, and its send is over; or else when whoever `carry` hands it to calls it.
    """

    def __init__(
        self, world_size: int, *, carry: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        self.world_size = world_size
        self.carry = carry
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, tuple[int, ...]], _Channel] = {}
        self._error: BaseException | None = None

    def wire(self, rank: int) -> ThreadWire:
        return self._join("", tuple(range(self.world_size)), rank)

    def lose(self, error: BaseException) -> None:
        """A worker is gone: everything under way, and everything after, fails with `error`."""
        with self._lock:
            self._error = error
            channels = list(self._channels.values())
        for channel in channels:
            with channel.lock:
                works, channel.open = channel.open, set()
            for work in works:
                work.fail(error)

    def _join(self, name: str, ranks: tuple[int, ...], rank: int) -> ThreadWire:
        with self._lock:
            channel = self._channels.setdefault((name, ranks), _Channel(len(ranks)))
        return ThreadWire(self, channel, name, ranks, ranks.index(rank))


class ThreadWire(LocalWire):
    """One worker's end of a ThreadWorld."""

    def __init__(
        self, world: ThreadWorld, channel: _Channel, name: str, ranks: tuple[int, ...], rank: int
    ) -> None:
        self.rank = rank
        self.world_size = channel.world_size
        self._world = world
        self._channel = channel
        self._name = name
        self._ranks = ranks
        self._issued = 0

    def exchange(
        self,
        *,
        send: Tensor | None = None,
        to: int | None = None,
        recv: Tensor | None = None,
        source: int | None = None,
        tag: int = 0,
    ) -> Work:
        sends = send is not None and to is not None
        work, channel = _Exchange(sends + (recv is not None)), self._channel
        with channel.lock:
            if self._refused(work):
                return work
            if work.halves > 0:
                channel.open.add(work)
            if recv is not None:
                channel.receives[self.rank, tag].append(_Receive(source, recv, work))
        if recv is not None:
            self._deliver(self.rank, tag)
        if send is not None and to is not None:
            arrive = partial(self._arrive, send.detach().clone(), to, tag, work)
            arrive() if self._world.carry is None else self._world.carry(arrive)
        work.end()
        return work

    def _arrive(self, message: Tensor, to: int, tag: int, work: _Exchange) -> None:
        with self._channel.lock:
            self._channel.messages[to, tag].append((self.rank, message))
            self._ended_half(work)
        work.end()
        self._deliver(to, tag)

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> ThreadWire:
        members = self._ranks if ranks is None else tuple(self._ranks[r] for r in ranks)
        return self._world._join(f"{self._name}/{name}", members, self._ranks[self.rank])

    def now(self) -> float:
        return time.perf_counter()

    def fail(self, error: PeerError) -> None:
        self._world.lose(error)

    def _refused(self, work: Work) -> bool:
        if self._world._error is not None:
            work.fail(self._world._error)
        return work.done()

    def _deliver(self, to: int, tag: int) -> None:
        """Hand out messages, first come first served."""
        channel, ready = self._channel, list[_Exchange]()
        with channel.lock:
            messages, receives = channel.messages[to, tag], channel.receives[to, tag]
            for receive in list(receives):
                fitting = (n for n, (sender, _) in enumerate(messages) if receive.source in (None, sender))
                found = next(fitting, None)
                if found is not None:
                    receive.recv.copy_(messages[found][1])
                    del messages[found]
                    receives.remove(receive)
                    self._ended_half(receive.work)
                    ready.append(receive.work)
        for work in ready:
            work.end()

    def _ended_half(self, work: _Exchange) -> None:
        work.half()
        if work.halves == 0:
            self._channel.open.discard(work)

    def _meet(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        if self.world_size == 1:
            if out is not data:
                out.copy_(data)
            return finished()
        work, channel = Work(), self._channel
        what = (op, source, tuple(data.shape), data.dtype)
        with channel.lock:
            if self._refused(work):
                return work
            meeting = channel.meetings.setdefault(self._issued, Meeting(what))
            self._issued += 1
            if (refusal := meeting.refusal(self.rank, what)) is not None:
                self._world.lose(refusal)
                work.fail(refusal)
                return work
            meeting.came[self.rank] = (data, out, work)
            channel.open.add(work)
            if len(meeting.came) < self.world_size:
                return work
            del channel.meetings[self._issued - 1]
            came = [meeting.came[r] for r in range(self.world_size)]
            settle(op, [data for data, _, _ in came], [out for _, out, _ in came], source=source)
            works = [work for _, _, work in came]
            channel.open.difference_update(works)
            for each in works:  # under the lock: collectives of a lane end in order
                each.finish()
        return work
