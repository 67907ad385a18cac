"""A world inside one process: workers are threads, turns of one thread, or events on a virtual clock.

A `Medium` says when an operation ends; the numbers are the same with any. As with Gloo, a send does not end
before its receive is posted. Sums are taken in order of rank, so they are the same bits on every run.
Collectives that do not match across workers raise PeerDiffers, where a backend would mix numbers or hang.
Tensors without storage (device "meta") are sizes only.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.errors import PeerDiffers, PeerError, PeerLate
from thinwire.traffic import Op, Round
from thinwire.wire.base import Buffer, Peer, Status
from thinwire.wire.work import Work, after, finished

Call = Callable[[], None]
FEW = 64
"""Workers up to which exchanges between kinds of workers are played one by one."""


class Medium(Protocol):
    """When operations end; `ended` calls are made without any lock held, in any thread."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> Work: ...

    def transfer(self, source: int, to: int, num_bytes: int, sent: Call, arrived: Call) -> None:
        """Carry a message that both ends have asked for."""

    def collective(self, what: Round, ranks: Sequence[int], ended: Call) -> None:
        """Carry out a collective that all of `ranks` have come to."""


class Immediate:
    """No time passes on the way."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> Work:
        return after(seconds)

    def transfer(self, source: int, to: int, num_bytes: int, sent: Call, arrived: Call) -> None:
        sent()
        arrived()

    def collective(self, what: Round, ranks: Sequence[int], ended: Call) -> None:
        ended()


class NotAlike(Exception):
    """An operation differs from worker to worker, so that one cannot act for others."""


class _Exchange(Work):
    """Both halves of an exchange; ends with the later one."""

    def __init__(self, halves: int) -> None:
        super().__init__()
        self._halves = halves

    def half(self) -> None:
        with self._lock:
            self._halves -= 1
            last = self._halves == 0
        if last:
            self.finish()


class _Post(NamedTuple):
    """One half of an exchange that waits for the other end."""

    source: Peer
    """None: from whoever sends first."""
    to: int
    data: Tensor
    work: _Exchange


@dataclass(slots=True)
class _Collective:
    """Who has come to a collective so far, and with what."""

    what: tuple[object, ...]
    came: dict[int, tuple[Tensor, Tensor, Work]] = field(default_factory=dict)


Posts = defaultdict[tuple[int, int], list[_Post]]
"""By receiver and tag, in the order they came."""


@dataclass(slots=True)
class _LaneState:
    """The state that the workers of one lane share."""

    collectives: dict[int, _Collective] = field(default_factory=dict)
    issued: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Collectives that each rank has come to."""
    sends: Posts = field(default_factory=lambda: defaultdict(list))
    receives: Posts = field(default_factory=lambda: defaultdict(list))
    swaps: defaultdict[int, dict[int, _Post]] = field(default_factory=lambda: defaultdict(dict))
    """By tag: the exchange of each worker that acts for others, until all of these have come."""


def _post(post: _Post, tag: int, others: Posts, own: Posts) -> list[_Post]:
    """The other end of a post, if it waits among `others`; if not, the post waits among its own kind."""
    waiting = others[post.to, tag]
    for index, other in enumerate(waiting):
        if None in (post.source, other.source) or post.source == other.source:
            return [waiting.pop(index)]
    own[post.to, tag].append(post)
    return []


class LocalWorld:
    """The shared memory of `world_size` workers; hand `lane(rank)` to each.

    Where workers do the same at the same time, some of them can act for all (`acting`): a collective of
    everybody then begins when these have come, and so does an exchange in which every worker sends as much as
    it receives. Only with sizes.
    """

    def __init__(
        self,
        world_size: int,
        medium: Medium | None = None,
        *,
        places: Sequence[tuple[str, str]] = (),
        acting: Sequence[int] = (),
    ) -> None:
        self.world_size = world_size
        self.medium = medium or Immediate()
        self.places = list(places) or [("localhost", "")] * world_size
        self.acting = tuple(acting)
        self.kinds_may_meet = world_size > FEW and len({site for _, site in self.places}) == 1
        """Whether exchanges between workers that act for others are played: roughly, for many on one site."""
        self.lock = threading.RLock()
        self.error: BaseException | None = None
        self.open: set[Work] = set()
        self.channels: dict[tuple[str, tuple[int, ...]], _LaneState] = {}
        self._everyone = tuple(range(world_size))

    def lane(self, rank: int) -> LocalLane:
        return LocalLane(self, "", self._everyone, rank)

    def lose(self, error: BaseException) -> None:
        """A worker is gone: everything under way, and everything after, fails with `error`."""
        with self.lock:
            self.error = self.error or error
            works, self.open = self.open, set()
        for work in works:
            work.fail(self.error)

    def end(self, works: Sequence[Work]) -> None:
        """End works, or one half of an exchange, unless the world was lost before."""
        for work in works:
            work.half() if isinstance(work, _Exchange) else work.finish()
        with self.lock:  # an exchange stays open until its other half has ended
            self.open.difference_update([work for work in works if work.done()])


class LocalLane:
    """One worker's end of a lane in a LocalWorld."""

    def __init__(self, world: LocalWorld, name: str, ranks: tuple[int, ...], rank: int) -> None:
        self.world_size = len(ranks)
        self.rank = rank if self.world_size == world.world_size else ranks.index(rank)
        self._world = world
        with world.lock:
            self._channel = world.channels.setdefault((name, ranks), _LaneState())
        self._name = name
        self._ranks = ranks
        self._check_alike(self.world_size == world.world_size, "collectives of some workers")

    @property
    def places(self) -> Sequence[tuple[str, str]]:
        return [self._world.places[rank] for rank in self._ranks]

    @property
    def listens_to(self) -> Sequence[Peer]:
        return [None]

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> LocalLane:
        members = self._ranks if ranks is None else tuple(self._ranks[r] for r in ranks)
        return LocalLane(self._world, f"{self._name}/{name}", members, self._ranks[self.rank])

    def now(self) -> float:
        return self._world.medium.now()

    def sleep(self, seconds: float) -> Work:
        return self._world.medium.sleep(seconds)

    def set_status(self, status: Status) -> None:
        """Nobody here asks who is alive."""

    @property
    def lost(self) -> BaseException | None:
        return self._world.error

    def missing(self, awaited_step: int = 0) -> None:
        return None

    def late_error(self, cause: str) -> PeerLate:
        return PeerLate(cause)

    def abort(self, error: PeerError) -> BaseException:
        self._world.lose(error)
        return self._world.error or error

    def close(self) -> None:
        """There is nothing to close."""

    # -- exchanges --------------------------------------------------------------------------------

    def exchange(
        self, *, send: Buffer = None, to: Peer = None, recv: Buffer = None, source: Peer = None, tag: int = 0
    ) -> Work:
        sends = send is not None and to is not None
        if not sends and recv is None:
            return finished()
        world, channel = self._world, self._channel
        if world.acting:
            return self._swap(send if sends else None, recv, tag)
        work, matches = _Exchange(sends + (recv is not None)), list[tuple[_Post, _Post]]()
        with world.lock:
            if self._refused(work):
                return work
            world.open.add(work)
            if recv is not None:
                own = _Post(source, self.rank, recv, work)
                matches += [(other, own) for other in _post(own, tag, channel.sends, channel.receives)]
            if send is not None and to is not None:
                own = _Post(self.rank, to, send.detach(), work)
                matches += [(own, other) for other in _post(own, tag, channel.receives, channel.sends)]
            for sent, received in matches:
                received.data.copy_(sent.data)
        for sent, received in matches:
            assert sent.source is not None, "a sender knows who it is"
            ends = (partial(world.end, [post.work]) for post in (sent, received))
            world.medium.transfer(self._ranks[sent.source], self._ranks[sent.to], sent.data.nbytes, *ends)
        return work

    def _swap(self, send: Buffer, recv: Buffer, tag: int) -> Work:
        """An exchange of workers that act for others: all of them send and receive, to and from their like.

        Where kinds of workers differ, all wait for the last: delays spread over everybody within a few
        rounds.
        """
        sizes = [None if data is None else data.nbytes for data in (send, recv)]
        self._check_alike(sizes[0] == sizes[1], "exchanges with a different size each way")
        assert send is not None
        work, world, came = _Exchange(2), self._world, self._channel.swaps[tag]
        self._check_alike(
            world.kinds_may_meet or len(world.acting) == 1, "exchanges between kinds of workers"
        )
        self._check_alike(self.rank not in came, "exchanges that overtake each other")
        came[self.rank] = _Post(self.rank, self.rank, send, work)
        if len(came) < len(world.acting):
            return work
        del self._channel.swaps[tag]
        for post in came.values():
            ends = (partial(world.end, [post.work]) for _ in range(2))
            world.medium.transfer(post.to, post.to, post.data.nbytes, *ends)
        return work

    # -- collectives ------------------------------------------------------------------------------

    def collective(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        """Come to the next collective of this lane."""
        self._check_alike(op != "broadcast", "broadcasts")
        if self.world_size == 1:
            if out is not data:
                out.copy_(data)
            return finished()
        work, world = Work(), self._world
        what = (op, source, tuple(data.shape), data.dtype)
        with world.lock:
            if self._refused(work):
                return work
            number = self._channel.issued[self.rank]
            self._channel.issued[self.rank] += 1
            collective = self._channel.collectives.setdefault(number, _Collective(what))
            if collective.what == what:
                collective.came[self.rank] = (data, out, work)
                world.open.add(work)
                if len(collective.came) < (len(world.acting) or self.world_size):
                    return work
                del self._channel.collectives[number]
                came = [collective.came[rank] for rank in sorted(collective.came)]
                if not data.is_meta:
                    outputs = {rank: out for rank, (_, out, _) in collective.came.items()}
                    inputs = [data for data, _, _ in came]
                    while len(inputs) < self.world_size:  # those that others act for
                        inputs.append(inputs[len(inputs) % len(came)])
                    _compute(op, inputs, outputs, source=source)
        if collective.what != what:
            hint = "all workers must run the same strategy with the same settings on the same model"
            message = f"worker {self.rank} does {what} where another does {collective.what}"
            world.lose(PeerDiffers(message, rank=self.rank, hint=hint))
            self._refused(work)
            return work
        done = Round(op=op, send_bytes=data.nbytes, source=source)
        world.medium.collective(done, self._ranks, lambda: world.end([work for _, _, work in came]))
        return work

    def _refused(self, work: Work) -> bool:
        if self._world.error is not None:
            work.fail(self._world.error)
        return work.done()

    def _check_alike(self, alike: bool, what: str) -> None:
        if self._world.acting and not alike:
            raise NotAlike(f"{what} differ from worker to worker")


def _compute(op: Op, inputs: Sequence[Tensor], outputs: Mapping[int, Tensor], *, source: int = 0) -> None:
    """Do a collective for everybody, now that everybody has come; outputs are by rank.

    An output is its own input (all-reduce, broadcast) or shares no memory with any.
    """
    # A few operations on large tensors: with many workers on a GPU, launching many small ones takes longer
    # than everything else.
    world_size, data = len(inputs), [each.detach().view(-1) for each in inputs]
    if op == "broadcast":
        outputs = {rank: out for rank, out in outputs.items() if rank != source}
        results = dict.fromkeys(outputs, data[source])
    elif op == "all_gather":
        results = dict.fromkeys(outputs, torch.cat(data))
    elif op == "all_to_all":
        parts = torch.stack(data).view(world_size, world_size, -1)
        results = {rank: parts[:, rank].reshape(-1) for rank in outputs}
    else:
        total = data[0].clone()
        for each in data[1:]:
            total += each
        shares = [total] * world_size if op == "all_reduce" else total.chunk(world_size)
        results = {rank: shares[rank] for rank in outputs}
    with torch.no_grad():
        pairs = [(out.view(-1), results[rank]) for rank, out in outputs.items()]
        torch._foreach_copy_([out for out, _ in pairs], [result for _, result in pairs])
