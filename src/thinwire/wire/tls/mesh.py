"""Messages between the workers of one world over one-way TLS connections, matched by peer, lane and tag.

A message is sent when its receiver has a place for it: a receive tells its sender (GRANT), and until then
nothing of the message is under way. So a connection never holds bytes that nobody reads, messages of one lane
do not wait behind those of another, and large messages both ways cannot block each other. A sender that has
no grant says that it waits (OFFER), for those who receive from whoever comes first.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from ssl import SSLSocket
from typing import Any, NamedTuple

from torch import Tensor, uint8

from thinwire.wire.tls.connection import (
    DATA,
    DATA_UNOFFERED,
    GRANT,
    OFFER,
    Frame,
    Outgoing,
    Receiver,
    Sender,
)
from thinwire.wire.tls.files import Contexts
from thinwire.wire.work import Work

_END_S = 3.0


class Key(NamedTuple):
    """What messages are matched by."""

    peer: int
    lane: int
    tag: int


@dataclass(slots=True)
class _Receive:
    place: memoryview
    work: Work
    key: Key | None = None
    """None while it may come from anybody."""
    at: int = 0


class TlsMesh:
    """One worker's messages to and from all others."""

    def __init__(
        self, outgoing: Mapping[int, SSLSocket], incoming: Mapping[int, SSLSocket], contexts: Contexts
    ) -> None:
        """Connections to and from every other worker, by its place."""
        self._lock = threading.Lock()
        """For everything below. Nothing is ended while it is held."""
        self._numbers = count()
        self._grants: dict[Key, deque[tuple[int, int]]] = {}
        """Messages that a peer waits for and nobody has sent yet: number and size."""
        self._waiting: dict[Key, deque[tuple[memoryview, Work]]] = {}
        """Messages that have been offered, until they are granted."""
        self._receives: dict[tuple[int, int], _Receive] = {}
        """By peer and number."""
        self._claims: defaultdict[Key, int] = defaultdict(int)
        """Grants that no offer and no message has answered."""
        self._offers: dict[tuple[int, int], list[int]] = {}
        """By lane and tag: peers that wait to send, in the order they came."""
        self._from_anyone: dict[tuple[int, int], deque[_Receive]] = {}
        self._gone: dict[int, str] = {}
        """Why nothing can be sent to, or comes from, a peer any more."""
        self._senders: dict[int, Sender] = {}
        for peer, each in outgoing.items():
            self._senders[peer] = Sender(each, contexts, str(peer), partial(self._unreachable, peer))
        self._receivers = [Receiver(each, contexts, peer, self) for peer, each in incoming.items()]

    # -- messages -------------------------------------------------------------------------------------

    def send(self, data: Tensor, to: int, lane: int, tag: int) -> Work:
        """Ends when the last byte is on its way."""
        work, key, place = Work(), Key(to, lane, tag), _bytes_of(data)
        with self._lock:
            cause = self._gone.get(to)
            grants = self._grants.get(key)
            if cause is None and not grants:
                self._waiting.setdefault(key, deque()).append((place, work))
                self._senders[to].tell(Frame(OFFER, tag, lane))
                return work
            granted = None
            if cause is None and grants:
                granted = grants.popleft()
                if not grants:
                    del self._grants[key]
        if granted is None:
            work.fail(RuntimeError(f"nothing can be sent to the worker: {cause}"))
        else:
            self._start(key, granted, place, work, DATA_UNOFFERED)
        return work

    def receive(self, data: Tensor, source: int | None, lane: int, tag: int) -> Work:
        """Ends when all has come; without a source, from whoever sends first."""
        receive = _Receive(_bytes_of(data), Work())
        with self._lock:
            offers = self._offers.get((lane, tag), [])
            if source is None and not offers:
                self._from_anyone.setdefault((lane, tag), deque()).append(receive)
                return receive.work
            key = Key(offers[0] if source is None else source, lane, tag)
            cause = self._gone.get(key.peer)
            if cause is None:
                if key.peer in offers:
                    self._forget_offer(key)
                else:
                    self._claims[key] += 1
                self._grant(receive, key)
        if cause is not None:
            receive.work.fail(RuntimeError(f"nothing comes from the worker: {cause}"))
        return receive.work

    def _grant(self, receive: _Receive, key: Key) -> None:
        number, receive.key = next(self._numbers), key
        self._receives[key.peer, number] = receive
        self._senders[key.peer].tell(Frame(GRANT, key.tag, key.lane, number, len(receive.place)))

    def _forget_offer(self, key: Key) -> None:
        offers = self._offers[key.lane, key.tag]
        offers.remove(key.peer)
        if not offers:
            del self._offers[key.lane, key.tag]

    def _start(self, key: Key, granted: tuple[int, int], place: memoryview, work: Work, kind: int) -> None:
        number, size = granted
        if size != len(place):
            work.fail(RuntimeError(f"a worker sends {len(place)} bytes where the other expects {size}"))
            return
        message = Outgoing(place, Frame(kind, key.tag, key.lane, number), work)
        if not self._senders[key.peer].send(message):
            self._fail([work], f"the connection to the worker has ended: {self._gone.get(key.peer)}")

    # -- what connections tell ------------------------------------------------------------------------

    def heard(self, peer: int, frame: Frame) -> memoryview | None:
        key = Key(peer, frame.lane, frame.tag)
        if frame.kind == OFFER:
            self._heard_offer(key)
        elif frame.kind == GRANT:
            self._heard_grant(key, frame)
        elif frame.kind in (DATA, DATA_UNOFFERED):
            return self._place_for(peer, frame)
        else:
            raise ConnectionError(f"a frame of the unknown kind {frame.kind}")
        return None

    def _heard_offer(self, key: Key) -> None:
        with self._lock:
            self._settle(key)

    def _settle(self, key: Key) -> None:
        """A message that a grant may have been waiting for; if none was, it waits to be granted.

        An offer may overtake an earlier message that had needed none, and take its claim. When that message
        comes there is no claim left, and the offer is still open: so both are counted alike.
        """
        place = key.lane, key.tag
        if self._claims.get(key):
            self._claims[key] -= 1
            if not self._claims[key]:
                del self._claims[key]
        elif place in self._from_anyone:
            receives = self._from_anyone[place]
            self._grant(receives.popleft(), key)
            if not receives:
                del self._from_anyone[place]
        else:
            self._offers.setdefault(place, []).append(key.peer)

    def _heard_grant(self, key: Key, frame: Frame) -> None:
        granted = frame.number, frame.size
        with self._lock:
            waiting = self._waiting.get(key)
            if not waiting:
                self._grants.setdefault(key, deque()).append(granted)
                return
            place, work = waiting.popleft()
            if not waiting:
                del self._waiting[key]
        self._start(key, granted, place, work, DATA)

    def _place_for(self, peer: int, frame: Frame) -> memoryview:
        with self._lock:
            receive = self._receives.get((peer, frame.number))
            if receive is None or receive.at + frame.size > len(receive.place):
                raise ConnectionError(f"{frame.size} bytes came that were not asked for")
            if frame.kind == DATA_UNOFFERED and receive.at == 0 and receive.key is not None:
                self._settle(receive.key)
            receive.at += frame.size
            return receive.place[receive.at - frame.size : receive.at]

    def landed(self, peer: int, frame: Frame) -> None:
        with self._lock:
            receive = self._receives[peer, frame.number]
            if receive.at < len(receive.place):
                return
            del self._receives[peer, frame.number]
        receive.work.finish()

    # -- endings --------------------------------------------------------------------------------------

    def ended(self, peer: int, cause: str) -> None:
        """A connection has ended, and all that was on it has been read."""
        with self._lock:
            cause = self._gone[peer] = self._gone.get(peer) or cause or "it has ended"
            receives = [key for key in self._receives if key[0] == peer]
            works = [self._receives.pop(key).work for key in receives]
            if len(self._gone) == len(self._senders):
                works += [each.work for waiting in self._from_anyone.values() for each in waiting]
                self._from_anyone = {}
        self._fail(works, f"the connection from the worker has ended: {cause}")
        self._unreachable(peer, cause)

    def _unreachable(self, peer: int, cause: str) -> None:
        """Nothing can be sent to a peer; what it has sent may still come, on the other connection."""
        with self._lock:
            self._gone.setdefault(peer, cause)
            keys = [key for key in self._waiting if key.peer == peer]
            works = [work for key in keys for _, work in self._waiting.pop(key)]
            for key in [key for key in self._grants if key.peer == peer]:
                del self._grants[key]
        works += self._senders[peer].drop()
        self._fail(works, f"the connection to the worker has ended: {cause}")

    @staticmethod
    def _fail(works: list[Work], message: str) -> None:
        for work in works:
            work.fail(RuntimeError(message))

    def close(self) -> None:
        """End the connections; nothing is under way here, though others may still be at it."""
        for sender in self._senders.values():
            sender.end()
        self.join()

    def abort(self) -> None:
        """End everything under way with an error."""
        with self._lock:
            works = [receive.work for receive in self._receives.values()]
            works += [receive.work for each in self._from_anyone.values() for receive in each]
            works += [work for each in self._waiting.values() for _, work in each]
            self._gone.update(dict.fromkeys(self._senders, "this worker has given up"))
            self._receives, self._from_anyone, self._waiting = {}, {}, {}
        for sender in self._senders.values():
            works += sender.drop()
            sender.abort()
        for receiver in self._receivers:
            receiver.abort()
        self._fail(works, "this worker has given up")

    def join(self) -> None:
        """Who has said good-bye does not wait for others to."""
        deadline = time.monotonic() + _END_S
        for sender in self._senders.values():
            sender.join(max(0.0, deadline - time.monotonic()))
        for receiver in self._receivers:
            receiver.abort()
            receiver.join(max(0.0, deadline - time.monotonic()))


def _bytes_of(data: Tensor) -> memoryview:
    """The memory of a tensor on the CPU, which is all in one piece."""
    flat: Any = data.detach().view(-1).view(uint8).numpy()
    return memoryview(flat)
