"""One worker's open connections to the others, the door at which new ones arrive, and a wake-up call."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from thinwire.elastic.handshake import KeyedChannel
from thinwire.elastic.membership import Member
from thinwire.wire.control import Message


class Channels(Mapping[str, KeyedChannel]):
    """Open connections by worker. Whoever owns them holds a lock for everything but `wait`."""

    def __init__(
        self,
        door: socket.socket,
        *,
        arrived: Callable[[socket.socket, str], None],
        heard: Callable[[Member, Message], None],
        ended: Callable[[KeyedChannel], None],
    ) -> None:
        """`arrived`: somebody, from an address, is at the door; `heard`: a message of a worker; `ended`: a
        connection has broken, and is closed and forgotten."""
        self._door, self._arrived, self._heard, self._ended = door, arrived, heard, ended
        self._by_id: dict[str, KeyedChannel] = {}
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        for end in (door, self._wake, self._woken):  # whoever was at the door may have gone
            end.setblocking(False)

    def __getitem__(self, id_: str) -> KeyedChannel:
        return self._by_id[id_]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._by_id))  # sending may find that one of them has broken

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, channel: KeyedChannel) -> None:
        """Keep a connection, instead of an earlier one to the same worker."""
        if (old := self._by_id.get(channel.peer.id)) is not None:
            self._remove(old)
        self._by_id[channel.peer.id] = channel
        self._selector.register(channel.socket, selectors.EVENT_READ, partial(self._receive, channel))

    def clear(self) -> None:
        for channel in list(self._by_id.values()):
            self._remove(channel)

    def close(self) -> None:
        self.clear()
        for each in (self._door, self._wake, self._woken, self._selector):
            each.close()

    # -- waiting --------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> list[Callable[[], None]]:
        """What is to be done for connections at which something has happened."""
        return [key.data for key, _ in self._selector.select(timeout_s)]

    def poke(self) -> None:
        """End somebody's `wait`."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            self._woken.recv(64)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, address = self._door.accept()
            self._arrived(connection, str(address[0]))

    def _receive(self, channel: KeyedChannel) -> None:
        messages, stands = channel.receive()
        for message in messages:
            self._heard(channel.peer, message)
        if not stands:
            self._drop(channel)

    # -- sending --------------------------------------------------------------------------------------

    def send(self, to: str, message: Message) -> None:
        channel = self._by_id.get(to)
        if channel is not None and not channel.send(message):
            self._drop(channel)

    def send_all(self, message: Message) -> None:
        for id_ in self:
            self.send(id_, message)

    def flush(self) -> None:
        """Go on sending what a peer had no room for."""
        for channel in list(self._by_id.values()):
            if channel.unsent and not channel.flush():
                self._drop(channel)

    def _drop(self, channel: KeyedChannel) -> None:
        if self._by_id.get(channel.peer.id) is channel:
            self._remove(channel)
            self._ended(channel)

    def _remove(self, channel: KeyedChannel) -> None:
        del self._by_id[channel.peer.id]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.socket)
        channel.socket.close()
