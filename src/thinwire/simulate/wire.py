"""The wire of the virtual clock: operations end when the network says, and carry real numbers.

A message leaves when both ends have asked for it, as with Gloo: a send alone does not end before its
receive is posted. Numbers are moved at that moment, or when a collective's last worker has come; buffers
under way are not looked at, so nobody can tell. Tensors without storage (device "meta") are sizes only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from thinwire.errors import PeerDiffers, PeerError, PeerLate
from thinwire.simulate.clock import Clock
from thinwire.simulate.network import Network
from thinwire.traffic import Round
from thinwire.wire.base import Work, finished
from thinwire.wire.settle import settle

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.traffic import Op


class _Exchange(Work):
    """Both halves of an exchange; ends with the later one."""

    def __init__(self, halves: int) -> None:
        super().__init__()
        self._halves = halves

    def half(self) -> None:
        self._halves -= 1
        if self._halves == 0:
            self.finish()


@dataclass(slots=True)
class _Meeting:
    """One collective: who has come so far, and with what."""

    what: tuple[object, ...]
    came: dict[int, tuple[Tensor, Tensor, Work]] = field(default_factory=dict)


class _Post(NamedTuple):
    """One half of an exchange that waits for the other end."""

    source: int | None
    """None: from whoever sends first."""
    data: Tensor
    work: _Exchange


Posts = defaultdict[tuple[int, int], list[_Post]]
"""By receiver and tag, in the order they came."""


@dataclass(slots=True)
class _Channel:
    """What the workers of one lane share."""

    meetings: dict[int, _Meeting] = field(default_factory=dict)
    sends: Posts = field(default_factory=lambda: defaultdict(list))
    receives: Posts = field(default_factory=lambda: defaultdict(list))


class NotAlike(Exception):
    """What a stand-in was asked to do differs from worker to worker."""


class VirtualWorld:
    """The workers of one world on one clock; rank r sits on `hosts[r]`.

    Where workers of equal speed do the same at the same time, some ranks can stand in for all: a collective
    of everybody then begins when all stand-ins have come, and loads everybody's card. Only with sizes.
    """

    def __init__(
        self, clock: Clock, network: Network, hosts: Sequence[int], *, stand_ins: Sequence[int] = ()
    ) -> None:
        self.clock = clock
        self.network = network
        self.hosts = list(hosts)
        self.stand_ins = tuple(stand_ins)
        """None if every worker acts for itself."""
        self.error: PeerError | None = None
        self.open: set[Work] = set()
        self._channels: dict[tuple[str, tuple[int, ...]], _Channel] = {}
        self._everyone = tuple(range(len(self.hosts)))

    def wire(self, rank: int) -> VirtualWire:
        return self.join("", self._everyone, rank)

    def join(self, name: str, ranks: tuple[int, ...], rank: int) -> VirtualWire:
        """The end of a lane of these ranks, for one of them."""
        channel = self._channels.setdefault((name, ranks), _Channel())
        return VirtualWire(self, channel, name, ranks, rank)

    def lose(self, error: PeerError) -> None:
        """A worker is gone: everything under way, and everything after, fails with `error`."""
        if self.error is None:
            self.error = error
        works, self.open = self.open, set()
        for work in works:
            work.fail(self.error)

    def end(self, time_s: float, works: Sequence[Work]) -> None:
        """End works at a time, unless the world is lost before."""

        def ended() -> None:
            self.open.difference_update(works)
            for work in works:
                work.half() if isinstance(work, _Exchange) else work.finish()

        self.clock.at(time_s, ended)


class VirtualWire:
    """One worker's end of a VirtualWorld."""

    def __init__(
        self, world: VirtualWorld, channel: _Channel, name: str, ranks: tuple[int, ...], rank: int
    ) -> None:
        self.world_size = len(ranks)
        self._place = rank if self.world_size == len(world.hosts) else ranks.index(rank)
        self._world = world
        self._channel = channel
        self._name = name
        self._ranks = ranks
        self._issued = 0
        self._to_come = self.world_size
        if world.stand_ins:
            self._to_come = len(world.stand_ins)
            _check_alike(self.world_size == len(world.hosts), "collectives of some workers")

    @property
    def rank(self) -> int:
        return self._place

    def all_reduce_(self, data: Tensor) -> Work:
        return self._meet("all_reduce", data, data)

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("reduce_scatter", data, out)

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("all_gather", data, out)

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("all_to_all", data, out)

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        _check_alike(not self._world.stand_ins, "broadcasts")
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
        _check_alike(not self._world.stand_ins, "exchanges")
        sends = send is not None and to is not None
        if not sends and recv is None:
            return finished()
        work = _Exchange(sends + (recv is not None))
        if self._refused(work):
            return work
        self._world.open.add(work)
        if recv is not None:
            self._receive(_Post(source, recv, work), tag)
        if send is not None and to is not None:
            self._send(_Post(self._place, send, work), to, tag)
        return work

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> VirtualWire:
        members = self._ranks if ranks is None else tuple(self._ranks[r] for r in ranks)
        return self._world.join(f"{self._name}/{name}", members, self._ranks[self._place])

    def now(self) -> float:
        return self._world.clock.now_s

    def tell(self, status: str) -> None:
        pass

    def late(self, cause: str) -> PeerLate:
        return PeerLate(cause)

    def fail(self, error: PeerError) -> None:
        self._world.lose(error)

    def close(self) -> None:
        pass

    def _refused(self, work: Work) -> bool:
        if self._world.error is not None:
            work.fail(self._world.error)
        return work.done()

    def _host(self, place: int) -> int:
        return self._world.hosts[self._ranks[place]]

    def _receive(self, receive: _Post, tag: int) -> None:
        sends = self._channel.sends[self._place, tag]
        for index, send in enumerate(sends):
            if receive.source in (None, send.source):
                del sends[index]
                self._transfer(send, receive, self._place)
                return
        self._channel.receives[self._place, tag].append(receive)

    def _send(self, send: _Post, to: int, tag: int) -> None:
        receives = self._channel.receives[to, tag]
        for index, receive in enumerate(receives):
            if receive.source in (None, send.source):
                del receives[index]
                self._transfer(send, receive, to)
                return
        self._channel.sends[to, tag].append(send)

    def _transfer(self, send: _Post, receive: _Post, to: int) -> None:
        """Let a message go that both ends have asked for."""
        if not send.data.is_meta:
            receive.data.copy_(send.data.detach())
        world, source = self._world, send.source
        assert source is not None, "a sender knows who it is"
        sent_s, here_s = world.network.transfer(
            self._host(source), self._host(to), send.data.nbytes, world.clock.now_s
        )
        world.end(sent_s, [send.work])
        world.end(here_s, [receive.work])

    def _meet(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        if self.world_size == 1:
            if out is not data:
                out.copy_(data)
            return finished()
        work, channel = Work(), self._channel
        if self._refused(work):
            return work
        what = (op, source, tuple(data.shape), data.dtype)
        meeting = channel.meetings.setdefault(self._issued, _Meeting(what))
        self._issued += 1
        if meeting.what != what:
            self._world.lose(
                PeerDiffers(
                    f"worker {self.rank} does {what} where another does {meeting.what}",
                    rank=self.rank,
                    hint="all workers must issue the same operations in the same order on a lane",
                )
            )
            self._refused(work)
            return work
        meeting.came[self._place] = (data, out, work)
        self._world.open.add(work)
        if len(meeting.came) == self._to_come:
            del channel.meetings[self._issued - 1]
            self._settle(op, source, meeting)
        return work

    def _settle(self, op: Op, source: int, meeting: _Meeting) -> None:
        world, came = self._world, [meeting.came[place] for place in sorted(meeting.came)]
        data = came[0][0]
        if not data.is_meta:
            settle(op, [data for data, _, _ in came], [out for _, out, _ in came], source=source)
        what = Round(op=op, send_bytes=data.nbytes, source=source)
        hosts = [world.hosts[rank] for rank in self._ranks]
        world.end(world.network.collective(what, hosts, world.clock.now_s), [work for _, _, work in came])


def _check_alike(alike: bool, what: str) -> None:
    if not alike:
        raise NotAlike(f"{what} differ from worker to worker")
