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
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from thinwire.errors import PeerLate

Message = list[Any]
LONGEST = 1 << 14
"""Bytes of a message; whoever sends more is not one of us."""
_HELLO_S = 5.0


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
    with open_door(address, backlog=world_size) as door:
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
                door.settimeout(max(0.01, deadline - time.monotonic()))
                each, _ = door.accept()
                try:
                    theirs, other, said = _read_hello(each)
                except (OSError, ValueError, TypeError, RecursionError):
                    theirs, other, said = "", -1, []
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


def _read_hello(connection: socket.socket) -> tuple[Any, Any, Message]:
    line, deadline = b"", time.monotonic() + _HELLO_S
    while not line.endswith(b"\n") and len(line) < LONGEST:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        if not (byte := connection.recv(1)):
            raise ConnectionError("closed before it said who it is")
        line += byte
    token, rank, about = json.loads(line)
    return token, rank, about


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
