"""Sockets from every worker to every other for a few bytes a second: who is there, and what went wrong.

They are apart from the data so that a blocked backend does not block them, and from the store so that nobody
depends on the host of the store once training runs. Only who has read a worker's token from the store gets
in, and the door is closed when all have come. What a peer sends is checked before it is used.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from thinwire.errors import PeerLate

Message = list[Any]
LONGEST = 1 << 14
"""Bytes of a message; whoever sends more is not one of us."""
_HELLO_S = 5.0
MOST_STRANGERS = 64
"""Connections beside those of workers that have not said yet who they are; of more, the oldest is closed."""
Hello = tuple[Any, Any, Message]
"""Token, rank, and what the worker tells about itself."""


@dataclass(slots=True)
class Channel:
    """The connection to one peer."""

    rank: int
    socket: socket.socket
    inbox: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Message) -> None:
        """Without waiting: a peer that does not read, or is gone, is noticed by its silence."""
        with self.lock, contextlib.suppress(OSError):
            self.socket.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> tuple[list[Message], bool]:
        """What has come, and whether the connection still stands."""
        try:
            data = self.socket.recv(LONGEST)
        except (BlockingIOError, InterruptedError):
            return [], True
        except OSError:
            return [], False
        *lines, self.inbox = (self.inbox + data).split(b"\n")
        messages = [parsed for line in lines if (parsed := parse(line)) is not None]
        return messages, bool(data) and len(self.inbox) < LONGEST


def parse(line: bytes) -> Message | None:
    """A message, or None for what is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, list) and message and isinstance(message[0], str) else None


def connect(store: Store, prefix: str, rank: int, world_size: int, about: Message, timeout_s: float) -> Mesh:
    """Meet all others through the store, and tell each `about`; names who has not come after `timeout_s`."""
    token, deadline = secrets.token_hex(16), time.monotonic() + timeout_s
    address = own_address(store)
    with (
        open_door(address, backlog=world_size) as door,
        contextlib.closing(callers(door, deadline, world_size + MOST_STRANGERS)) as guests,
    ):
        keys = [f"{prefix}control/{other}" for other in range(world_size)]
        store.set(keys[rank], json.dumps([address, door.getsockname()[1], token]))
        channels, abouts = dict[int, Channel](), {rank: about}
        try:
            for other in range(rank):
                store.wait([keys[other]], timedelta(seconds=max(0.01, deadline - time.monotonic())))
                host, port, theirs = json.loads(store.get(keys[other]))
                each = socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic()))
                channels[other] = Channel(other, each)
                each.sendall(json.dumps([theirs, rank, about]).encode() + b"\n")
                abouts[other] = _read_hello(each)[2]
            while len(channels) < world_size - 1:
                each, (theirs, other, said) = next(guests)
                # JSON may hold half a character, which cannot be encoded
                known = hmac.compare_digest(str(theirs).encode(errors="replace"), token.encode())
                if known and other in range(rank + 1, world_size):
                    each.sendall(json.dumps(["", rank, about]).encode() + b"\n")
                    channels[other], abouts[other] = Channel(other, each), said
                else:
                    each.close()  # a stranger
        except (OSError, RuntimeError, ValueError, TypeError) as error:  # what is there may be no worker
            for channel in channels.values():
                channel.socket.close()
            absent = sorted(set(range(world_size)) - set(abouts))
            waited_s = timeout_s + min(0.0, time.monotonic() - deadline)
            raise PeerLate(
                f"worker {rank} has waited {round(waited_s, 1):g} s for workers {absent} to attach",
                rank=absent[0],
                hint=f"see the output of that worker, and whether it can be reached from here ({error})",
            ) from error
    return Mesh(rank, channels, [abouts[other] for other in range(world_size)])


def callers(door: socket.socket, deadline: float, most: int) -> Generator[tuple[socket.socket, Hello]]:
    """Yield those who come to a door once they have said who they are; who says nothing holds up nobody.

    Of more than `most` who have not said it yet, the oldest is sent away. TimeoutError at the deadline.
    Closing the generator closes whoever has not been yielded.
    """
    door.settimeout(0.0)
    guests: dict[socket.socket, tuple[bytearray, float]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(door, selectors.EVENT_READ)

        def leave(guest: socket.socket) -> None:
            del guests[guest]
            selector.unregister(guest)

        try:
            while (left_s := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(min(left_s, _HELLO_S / 10)):
                    guest = key.fileobj
                    assert isinstance(guest, socket.socket)
                    if guest is door:
                        with contextlib.suppress(OSError):  # it has left again
                            came, _ = door.accept()
                            came.settimeout(0.0)
                            selector.register(came, selectors.EVENT_READ)
                            guests[came] = bytearray(), time.monotonic() + _HELLO_S
                    elif (line := _read_line(guest, guests[guest][0])) is not None:
                        leave(guest)
                        if (hello := _as_hello(line)) is None:
                            guest.close()
                        else:
                            guest.settimeout(_HELLO_S)
                            yield guest, hello
                late = [guest for guest, (_, until) in guests.items() if until < time.monotonic()]
                for guest in late or list(guests)[: max(0, len(guests) - most)]:
                    leave(guest)
                    guest.close()
            raise TimeoutError("timed out")
        finally:
            for guest in guests:
                guest.close()


def _read_line(connection: socket.socket, line: bytearray) -> bytes | None:
    """The first line, when all of it has come; empty if it never will. Nothing after it is read."""
    try:
        while not line.endswith(b"\n") and len(line) < LONGEST:
            if not (byte := connection.recv(1)):
                return b""
            line += byte
    except BlockingIOError:
        return None
    except OSError:
        return b""
    return bytes(line)


def _as_hello(line: bytes) -> Hello | None:
    try:
        token, rank, about = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return token, rank, about


def _read_hello(connection: socket.socket) -> Hello:
    """What a worker answers that this one has connected to."""
    line, deadline = b"", time.monotonic() + _HELLO_S
    while not line.endswith(b"\n") and len(line) < LONGEST:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        if not (byte := connection.recv(1)):
            raise ConnectionError("closed before it said who it is")
        line += byte
    if (hello := _as_hello(line)) is None:
        raise ValueError("what answers is no worker")
    return hello


def own_address(store: Store) -> str:
    """The address by which this host reaches the host of the store, so the others reach it by that too."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", "") or socket.gethostname()
    try:
        family, *_, target = socket.getaddrinfo(host, getattr(store, "port", 9), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def open_door(address: str, port: int = 0, *, backlog: int) -> socket.socket:
    """Listen at an address of this host, which `own_address` may have found to be one of IPv6."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=backlog)


class Mesh:
    """The channels of one worker."""

    def __init__(self, rank: int, channels: dict[int, Channel], abouts: list[Message]) -> None:
        self.rank = rank
        self.abouts = abouts
        """What each worker has told of itself when it came."""
        self._channels = channels
        self._selector = selectors.DefaultSelector()
        for channel in channels.values():
            channel.socket.setblocking(False)
            channel.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(channel.socket, selectors.EVENT_READ, channel)

    def break_after(self, unanswered_s: float) -> None:
        """End connections whose other host has not answered for so long."""
        for channel in self._channels.values():
            channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                limit_ms = int(1000 * unanswered_s)
                channel.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)

    def send(self, message: Message) -> None:
        """To everyone who is still connected."""
        for channel in list(self._channels.values()):
            channel.send(message)

    def poll(
        self, timeout_s: float, hear: Callable[[int, Message], None], closed: Callable[[int], None]
    ) -> None:
        """Wait for messages, and hand them on with the sender's rank; `closed` for who is gone."""
        for key, _ in self._selector.select(timeout_s):
            channel: Channel = key.data
            messages, stands = channel.receive()
            for message in messages:
                hear(channel.rank, message)
            if not stands:
                self._selector.unregister(channel.socket)
                del self._channels[channel.rank]
                channel.socket.close()
                closed(channel.rank)

    def close(self) -> None:
        self._selector.close()
        for channel in self._channels.values():
            channel.socket.close()
