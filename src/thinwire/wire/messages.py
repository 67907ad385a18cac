"""Messages to whoever listens: a header that says who sends how much, then the data.

A listener has one receive open for headers from anybody, or one for each other worker (`listens_to` of the
lane). They stay open while training pauses; at detach the goodbyes of others end them, since a backend's
receive cannot be taken back. Data is sent when its receive is posted, so a listener that has no room for a
message leaves it with its sender, whose `send` does not end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from thinwire.traffic import Traffic
from thinwire.wire.work import Work, all_of, finished

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.wire.base import Lane, Peer
    from thinwire.wire.wire import Meter, Wire

HEADERS, PAYLOADS, ANSWERS = 1 << 24, 2 << 24, 3 << 24
"""Tags of messages begin here, out of the way of exchanges."""
_GOODBYE = -1
_HEADER = 3
"""Numbers in a header: sender (or goodbye), tag and bytes."""


class Received(NamedTuple):
    """A message that somebody sent here."""

    source: int
    tag: int
    data: Tensor


@dataclass(slots=True)
class Answer:
    """An answer to come."""

    data: Tensor
    work: Work


class Messenger:
    """Sends messages of one worker, and receives those of others."""

    def __init__(self, lane: Lane, meter: Meter) -> None:
        self._lane = lane
        self._meter = meter
        self._lock = threading.Lock()
        """For what is counted and kept here; never held while something is sent, which may run callbacks."""
        self._sending = threading.Lock()
        """Keeps headers and payloads in one order; nobody who is called back takes it."""
        self._like: Tensor | None = None
        self._ready: deque[Received] = deque()
        """What has come for this worker."""
        self._news = Work()
        """Ends when something is ready, or listeners are to end."""
        self._open: Work | None = None
        """Ends when no receive is open any more."""
        self._num_open = 0
        self._error: BaseException | None = None
        self._outgoing: list[Work] = []
        self._sent = [0] * lane.world_size
        self._handled = [0] * lane.world_size
        """Messages to and from each worker: those it has dealt with, so that it listens again."""
        self._progress = Work()
        """Ends when one more was handled."""
        self._own_answers: dict[int, deque[Answer]] = {}
        self._holds = False
        """Whether messages wait at their sender until the one before was released."""
        self._waiting: dict[tuple[int, int], deque[int]] = {}
        """By sender and tag of those that are not released yet: the bytes of each that waits behind them."""
        self.pausing = Work()
        """Ends when training pauses: then listeners end as soon as nothing is left to hand out."""

    @staticmethod
    def num_bytes(data: Tensor) -> int:
        return data.nbytes + 8 * _HEADER

    # -- sending ----------------------------------------------------------------------------------

    def send(self, data: Tensor, to: int, tag: int) -> Work:
        with self._lock:
            self._sent[to] += 1
        if to == self._lane.rank:
            self._deliver(Received(to, tag, data.clone()))
            return finished()
        header = torch.tensor([self._lane.rank, tag, data.nbytes])
        with self._sending:
            works = [
                self._lane.exchange(send=header, to=to, tag=HEADERS),
                self._lane.exchange(send=data.cpu() if data.is_cuda else data, to=to, tag=PAYLOADS + tag),
            ]
        with self._lock:
            self._outgoing = [work for work in self._outgoing if not work.done() or work.error] + works
        return all_of(works)

    def expect_answer(self, like: Tensor, to: int, tag: int) -> Answer:
        if to == self._lane.rank:
            answer = Answer(like, Work())
            self._own_answers.setdefault(tag, deque()).append(answer)
            if self._error is not None:
                answer.work.fail(self._error)
            return answer
        data = torch.empty_like(like)
        return Answer(data, self._lane.exchange(recv=data, source=to, tag=ANSWERS + tag))

    def answer(self, data: Tensor, to: int, tag: int) -> Work:
        if to == self._lane.rank:
            answer = self._own_answers[tag].popleft()
            answer.data = data.clone()
            answer.work.finish()
            return finished()
        return self._lane.exchange(send=data, to=to, tag=ANSWERS + tag)

    # -- listening --------------------------------------------------------------------------------

    def listen(self, like: Tensor, *, holds: bool) -> AsyncIterator[Received]:
        self._like, self._holds = like, holds
        if self._open is None and self._lane.world_size > 1:
            self._open, self._num_open = Work(), len(self._lane.listens_to)
            for source in self._lane.listens_to:
                self._receive_header(source)
        return self._messages(like.device)

    async def _messages(self, device: torch.device) -> AsyncIterator[Received]:
        while True:
            news = self._news  # before looking, so that nothing slips in between
            if self._error is not None:
                raise self._error
            if self._ready:
                source, tag, data = self._ready.popleft()
                yield Received(source, tag, data.to(device))
                self.handled(source)
            elif self.pausing.done():
                return
            else:
                await news

    def _receive_header(self, expected: Peer) -> None:
        header = torch.empty(_HEADER, dtype=torch.int64)
        work = self._lane.exchange(recv=header, source=expected, tag=HEADERS)
        work.when_done(lambda: self._header_came(header, work, expected))

    def _header_came(self, header: Tensor, work: Work, expected: Peer) -> None:
        if self._failed(work):
            return
        source, tag, num_bytes = header.tolist()
        if source == _GOODBYE:
            self._end_receive()
            return
        with self._lock:
            held = self._holds and (source, tag) in self._waiting
            if held:
                self._waiting[source, tag].append(num_bytes)
            elif self._holds:
                self._waiting[source, tag] = deque()
        if not held:
            self._receive_payload(source, tag, num_bytes)
        self._receive_header(expected)

    def _end_receive(self) -> None:
        with self._lock:
            self._num_open -= 1
            last = self._num_open == 0
        if last:
            assert self._open is not None
            self._open.finish()

    def _receive_payload(self, source: int, tag: int, num_bytes: int) -> None:
        like = self._like
        assert like is not None, "whoever receives has said what"
        device = "meta" if like.is_meta else "cpu"
        data = torch.empty(num_bytes // like.element_size(), dtype=like.dtype, device=device)
        came = self._lane.exchange(recv=data, source=source, tag=PAYLOADS + tag)
        came.when_done(lambda: self._payload_came(Received(source, tag, data), came))

    def release(self, source: int, tag: int) -> None:
        with self._lock:
            waiting = self._waiting.get((source, tag))
            if not waiting:
                self._waiting.pop((source, tag), None)
                return
            num_bytes = waiting.popleft()
        self._receive_payload(source, tag, num_bytes)

    def _release_all(self) -> None:
        with self._lock:
            waiting, self._waiting, self._holds = self._waiting, {}, False
        for (source, tag), sizes in waiting.items():
            for num_bytes in sizes:
                self._receive_payload(source, tag, num_bytes)

    def _payload_came(self, message: Received, work: Work) -> None:
        if not self._failed(work):
            self._meter.count(Traffic(received_bytes=self.num_bytes(message.data)))
            self._deliver(message)

    def _deliver(self, message: Received) -> None:
        self._ready.append(message)
        self._wake()

    def _failed(self, work: Work) -> bool:
        if work.error is None:
            return False
        self._error = work.error
        self._wake()
        for answers in list(self._own_answers.values()):  # which nobody will give any more
            for answer in list(answers):
                answer.work.fail(work.error)
        return True

    def _wake(self) -> None:
        with self._lock:
            news, self._news = self._news, Work()
        news.finish()

    def handled(self, source: int) -> None:
        with self._lock:
            self._handled[source] += 1
            progress, self._progress = self._progress, Work()
        progress.finish()

    # -- pausing and leaving ----------------------------------------------------------------------

    async def quiesce(self, wire: Wire) -> None:
        """Return when every message of every worker was handled; then the listeners end. Called by all."""
        self._release_all()  # who released them before waits for this one now
        while True:
            await all_of(self._outgoing)
            counted = torch.tensor(self._sent)
            expected = torch.empty_like(counted)
            await wire.all_to_all(counted, expected)
            while True:
                progress = self._progress  # before looking, so that nothing slips in between
                if all(done >= sent for done, sent in zip(self._handled, expected.tolist(), strict=True)):
                    break
                await progress
            more = torch.tensor([int(counted.tolist() != self._sent)])  # a handler may have sent on
            await wire.all_reduce_(more)
            if not int(more):
                break
        self.pausing.finish()
        self._wake()

    def resume(self) -> None:
        """Training goes on."""
        self.pausing = Work()

    async def say_goodbye(self, wire: Wire) -> None:
        """End the open receives of all workers: those for one worker by that one, those for anybody by the
        neighbour. Called by all, after `quiesce`."""
        listens = torch.empty(wire.world_size, dtype=torch.int64)
        await wire.all_gather(torch.tensor([int(self._open is not None)]), listens)
        others = [(wire.rank + step) % wire.world_size for step in range(1, wire.world_size)]
        by_neighbour = None in self._lane.listens_to
        for other in others[:1] if by_neighbour else others:
            if listens[other]:
                header = torch.tensor([_GOODBYE, 0, 0])
                await self._lane.exchange(send=header, to=other, tag=HEADERS)
        if self._open is not None:
            await self._open
