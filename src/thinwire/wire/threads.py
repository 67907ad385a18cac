"""A whole world inside one process: workers are threads (or turns of one thread), messages are copies.

Sums are taken in order of rank, so they are the same bits on every run. Operations that do not
match across workers raise PeerDiffers, where a backend would mix numbers or hang.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinwire.errors import PeerDiffers, PeerError, PeerLate
from thinwire.wire.base import Work, finished
from thinwire.wire.settle import settle

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.traffic import Op


@dataclass(slots=True)
class _Meeting:
    """One collective: who has come so far, and with what."""

    what: tuple[object, ...]
    came: dict[int, tuple[Tensor, Tensor, Work]] = field(default_factory=dict)


class _Channel:
    """What the workers of one lane share."""

    def __init__(self, world_size: int) -> None:
        self.lock = threading.RLock()
        self.world_size = world_size
        self.meetings: dict[int, _Meeting] = {}
        self.messages: defaultdict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int, int], deque[tuple[Tensor, Work]]] = defaultdict(deque)
        self.open: set[Work] = set()


class ThreadWorld:
    """The shared memory of `world_size` workers; hand `wire(rank)` to each."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
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


class ThreadWire:
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

    def all_reduce_(self, data: Tensor) -> Work:
        return self._meet("all_reduce", data, data)

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("reduce_scatter", data, out)

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("all_gather", data, out)

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("all_to_all", data, out)

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        return self._meet("broadcast", data, data, source)

    def exchange(
        self,
        *,
        send: Tensor | None = None,
        to: int | None = None,
        recv: Tensor | None = None,
        source: int | None = None,
        tag: int = 0,
    ) -> Work:
        work, channel, ready = Work(), self._channel, []
        with channel.lock:
            if self._refused(work):
                return work
            if recv is not None and source is not None:
                channel.open.add(work)
                channel.receives[source, self.rank, tag].append((recv, work))
                ready += self._deliver((source, self.rank, tag))
            if send is not None and to is not None:
                channel.messages[self.rank, to, tag].append(send.detach().clone())
                ready += self._deliver((self.rank, to, tag))
        for each in ready:
            each.finish()
        if recv is None:
            work.finish()
        return work

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> ThreadWire:
        members = self._ranks if ranks is None else tuple(self._ranks[r] for r in ranks)
        return self._world._join(f"{self._name}/{name}", members, self._ranks[self.rank])

    def tell(self, status: str) -> None:
        pass

    def late(self, cause: str) -> PeerLate:
        return PeerLate(cause)

    def fail(self, error: PeerError) -> None:
        self._world.lose(error)

    def close(self) -> None:
        pass

    def _refused(self, work: Work) -> bool:
        if self._world._error is not None:
            work.fail(self._world._error)
        return work.done()

    def _deliver(self, key: tuple[int, int, int]) -> list[Work]:
        messages, receives, ready = self._channel.messages[key], self._channel.receives[key], []
        while messages and receives:
            recv, work = receives.popleft()
            recv.copy_(messages.popleft())
            self._channel.open.discard(work)
            ready.append(work)
        return ready

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
            meeting = channel.meetings.setdefault(self._issued, _Meeting(what))
            self._issued += 1
            if meeting.what != what:
                error = PeerDiffers(
                    f"worker {self.rank} does {what} where another does {meeting.what}",
                    rank=self.rank,
                    hint="all workers must issue the same operations in the same order on a lane",
                )
                self._world.lose(error)
                work.fail(error)
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
