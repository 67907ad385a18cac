"""The wire: what a strategy's coroutine sends and receives through; all traffic is counted here."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence

from torch import Tensor

from thinwire.errors import UsageError
from thinwire.traffic import Op, Round, Traffic
from thinwire.wire.base import Buffer, Lane, Peer
from thinwire.wire.messages import Messenger, Received
from thinwire.wire.sequencer import Ranks, Sequencer, Ticket, group_of
from thinwire.wire.work import Work


class Meter:
    """A running total of what one worker sends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self.traffic = Traffic()
        self.rounds = 0

    def count(self, traffic: Traffic) -> None:
        with self._lock:
            self.traffic += traffic
            self.rounds += 1


class Wire:
    """One coroutine's access to the other workers, or to a group of them.

    Collectives may be issued at any time and in any number of phases: all workers see them in one order. A
    buffer belongs to the operation until its work is done. A world of one runs the same code and sends
    nothing.
    """

    def __init__(
        self,
        lane: Lane,
        sequencer: Sequencer,
        ticket: Ticket,
        meter: Meter,
        messenger: Messenger,
        ranks: Ranks | None = None,
    ) -> None:
        self._lane = lane
        self._sequencer = sequencer
        self._ticket = ticket
        self._meter = meter
        self._messenger = messenger
        self._ranks = ranks
        self.rank: int = lane.rank if ranks is None else ranks.index(lane.rank)
        """This worker's number, from 0, in the group."""
        self.world_size: int = lane.world_size if ranks is None else len(ranks)
        """How many workers the group has."""

    # -- collectives ------------------------------------------------------------------------------

    def all_reduce_(self, data: Tensor) -> Work:
        """Sum `data` over all workers, in place."""
        return self._collective("all_reduce", data, data)

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        """Sum `data` over all workers; this worker's part of the sum ends in `out`."""
        return self._collective("reduce_scatter", data, out)

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        """Put every worker's `data` (of equal size) into `out`, in order of rank."""
        return self._collective("all_gather", data, out)

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        """Send the i-th part of `data` to worker i; the part from worker i ends in part i of `out`."""
        return self._collective("all_to_all", data, out)

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        """Overwrite `data` with that of worker `source`."""
        return self._collective("broadcast", data, data, source)

    def _collective(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        self._count(Round(op=op, send_bytes=data.nbytes, source=source))
        return self._sequencer.issue(
            self._ticket, self._ranks, lambda lane: lane.collective(op, data, out, source), data
        )

    # -- two workers ------------------------------------------------------------------------------

    def exchange(
        self, *, send: Buffer = None, to: Peer = None, recv: Buffer = None, source: Peer = None, tag: int = 0
    ) -> Work:
        """Send to one peer and receive from one, at the same time; either half may be absent.

        Matched by peers and tag, in any order with other operations.
        """
        if recv is not None and source is None:
            raise UsageError(
                "exchange receives from a given worker, and source is None",
                hint="`async for message in wire.listen(like)` receives from whoever sends",
            )
        sizes = [0 if data is None else data.nbytes for data in (send, recv)]
        self._count(Round(op="exchange", send_bytes=sizes[0], recv_bytes=sizes[1]))
        to, source = self._base_rank(to), self._base_rank(source)
        return self._lane.exchange(send=send, to=to, recv=recv, source=source, tag=tag)

    def listen(self, like: Tensor, *, holds: bool = False) -> AsyncIterator[Received]:
        """Receive what others `send` or `ask` here: `async for source, tag, data in wire.listen(like)`.

        Messages have the dtype and device of `like`, and any length. The loop ends when training pauses or
        detaches, after every message sent to it was handled; `serve` is started again when training goes on.
        `holds`: a message stays with its sender, whose `send` does not end, until `release` was called for
        the one before it from that sender with that tag; a pause releases all.
        """
        self._check_whole("listen")
        return self._messenger.listen(like, holds=holds)

    def release(self, *, source: int, tag: int = 0) -> None:
        """Take the next message of a sender and tag: the last one needs no memory any more."""
        self._messenger.release(source, tag)

    def send(self, data: Tensor, *, to: int, tag: int = 0) -> Work:
        """Send a message to a worker that listens; it never waits for an answer."""
        self._check_whole("send")
        if to != self.rank:
            self._count(Round(op="exchange", send_bytes=self._messenger.num_bytes(data)))
        return self._messenger.send(data, to, tag)

    async def ask(self, data: Tensor, *, to: int, tag: int = 0, like: Tensor | None = None) -> Tensor:
        """Send a message to a worker that listens, and return its answer, which has the size of `like` (by
        default that of `data`)."""
        answer = self._messenger.expect_answer(data if like is None else like, to, tag)
        await self.send(data, to=to, tag=tag)
        await answer.work
        if to != self.rank:
            self._count(Round(op="exchange", recv_bytes=answer.data.nbytes))
        return answer.data

    def answer(self, data: Tensor, *, to: int, tag: int = 0) -> Work:
        """Answer the message of a worker that asked; called once for each, in the order they came."""
        if to != self.rank:
            self._count(Round(op="exchange", send_bytes=data.nbytes))
        return self._messenger.answer(data, to, tag)

    # -- who is where -----------------------------------------------------------------------------

    def group(self, ranks: Sequence[int]) -> Wire:
        """The wire among some workers, this one included; ranks there count from 0 in this order."""
        base = tuple(ranks if self._ranks is None else [self._ranks[rank] for rank in ranks])
        group = group_of(base, self._lane)
        return Wire(self._lane, self._sequencer, self._ticket, self._meter, self._messenger, group)

    def host_of(self, rank: int) -> str:
        """The name of a worker's host."""
        return self._places[rank][0]

    def hosts(self) -> list[list[int]]:
        """The workers of each host, in order of their first rank."""
        return _partition([host for host, _ in self._places])

    def sites(self) -> list[list[int]]:
        """The workers of each site, hosts joined by fast paths; one site unless `THINWIRE_SITE` is set."""
        return _partition([site for _, site in self._places])

    @property
    def _places(self) -> list[tuple[str, str]]:
        places = self._lane.places
        return [places[rank] for rank in (range(len(places)) if self._ranks is None else self._ranks)]

    def now(self) -> float:
        """Seconds on the clock that this wire's works end by; only differences mean something."""
        return self._lane.now()

    def sleep(self, seconds: float) -> Work:
        """A work that ends after so many seconds of that clock, or when it is finished before."""
        return self._lane.sleep(seconds)

    @property
    def pausing(self) -> Work:
        """Ends when training pauses: for a `serve` that does not listen, which ends then."""
        return self._messenger.pausing

    def _check_whole(self, what: str) -> None:
        if self._ranks is not None:
            raise UsageError(
                f"{what} is for the wire of all workers, not for one of a group",
                hint="use the wire that the strategy was given, and ranks among all workers",
            )

    def _base_rank(self, rank: int | None) -> int | None:
        return rank if rank is None or self._ranks is None else self._ranks[rank]

    def _count(self, round_: Round) -> None:
        if self.world_size > 1:
            self._meter.count(round_.traffic(self.rank, self.world_size))


def _partition(names: Sequence[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return list(found.values())
