"""One-way connections between two workers: who connects sends, who accepts receives, each in its own thread.

One way, since an `ssl` object may be used by one thread at a time, and since a connection whose sender never
has anything to read ends cleanly: the kernel delivers what was sent also after its process is gone, where one
with unread bytes would be reset, and what is under way with it.

A frame is a kind, a tag, a lane, a number and a size; after DATA follow `size` bytes.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from thinwire.wire.tls.files import Contexts
from thinwire.wire.work import Work

CHUNK_BYTES = 256 << 10
"""Bytes of one message sent at a time: messages of other lanes, and small frames, take turns."""
SMALL_BYTES = 12 << 10
"""Largest chunk that is sent with its header, in one record."""
REKEY_BYTES = 1 << 38
"""Bytes after which a connection gets new keys: AES-GCM is good for about 2**24.5 records of 16 KiB, and
Python's ssl cannot update keys."""
_GOODBYE_S = 2.0

OFFER, GRANT, DATA, DATA_UNOFFERED, GOODBYE, REKEY = range(6)
_FRAME = struct.Struct(">BIQQQ")


class Frame(NamedTuple):
    kind: int
    tag: int = 0
    lane: int = 0
    number: int = 0
    """Number that the receiver has given to the message."""
    size: int = 0

    def pack(self) -> bytes:
        return _FRAME.pack(*self)


@dataclass(slots=True)
class Outgoing:
    """A message that its receiver waits for."""

    data: memoryview
    frame: Frame
    """Its first frame, but for the size."""
    work: Work
    at: int = 0


def shut_down(connection: socket.socket) -> None:
    """Wake whoever blocks in it. Without telling `ssl`, which another thread may be in."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Sender:
    """The sending end: small frames first, then a chunk of a message of each lane in turn."""

    def __init__(
        self, connection: ssl.SSLSocket, contexts: Contexts, name: str, broken: Callable[[str], None]
    ) -> None:
        """`broken`: called once if the connection ends before this worker has ended it."""
        self._connection, self._contexts, self._broken = connection, contexts, broken
        self._changed = threading.Condition()
        self._frames: list[bytes] = []
        self._lanes: OrderedDict[int, deque[Outgoing]] = OrderedDict()
        self._current: Outgoing | None = None
        """The message of which a part is being written."""
        self._ending = self._dropped = False
        self._sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"thinwire-tls-to-{name}", daemon=True)
        self._thread.start()

    def tell(self, frame: Frame) -> None:
        with self._changed:
            self._frames.append(frame.pack())
            self._changed.notify()

    def send(self, message: Outgoing) -> bool:
        """False if it comes too late: what was there has been dropped."""
        with self._changed:
            if self._dropped:
                return False
            self._lanes.setdefault(message.frame.lane, deque()).append(message)
            self._changed.notify()
            return True

    def end(self) -> None:
        """Say good-bye when all is sent."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def drop(self) -> list[Work]:
        """Forget messages that are not sent, and take no more; returns their works."""
        with self._changed:
            self._dropped = True
            messages = [message for each in self._lanes.values() for message in each]
            messages += [self._current] if self._current is not None else []
            self._lanes = OrderedDict()
            return [message.work for message in messages]

    def abort(self) -> None:
        """End now."""
        self.end()
        shut_down(self._connection)

    def join(self, deadline_s: float) -> None:
        self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._frames or self._lanes or self._ending):
                        self._changed.wait()
                    frames, self._frames = b"".join(self._frames), []
                    message = self._current = self._next()
                    ends = self._ending and message is None
                self._write(frames, message)
                if ends:
                    break
            self._say_goodbye()
        except (OSError, ValueError) as error:  # ValueError: an ssl object that was closed
            self._broken(str(error) or type(error).__name__)
        self._connection.close()

    def _next(self) -> Outgoing | None:
        """The message that has its turn."""
        if not self._lanes:
            return None
        lane, messages = next(iter(self._lanes.items()))
        message = messages[0]
        if message.at + CHUNK_BYTES >= len(message.data):
            messages.popleft()
        if messages:
            self._lanes.move_to_end(lane)
        else:
            del self._lanes[lane]
        return message

    def _write(self, frames: bytes, message: Outgoing | None) -> None:
        if message is None:
            if frames:
                self._connection.sendall(frames)
            return
        chunk = message.data[message.at : message.at + CHUNK_BYTES]
        frame = message.frame if message.at == 0 else message.frame._replace(kind=DATA)
        frames += frame._replace(size=len(chunk)).pack()
        if len(chunk) <= SMALL_BYTES:
            self._connection.sendall(frames + chunk)
        else:
            self._connection.sendall(frames)
            self._connection.sendall(chunk)
        message.at += len(chunk)
        if message.at == len(message.data):
            message.work.finish()
        self._sent_bytes += len(chunk)
        if self._sent_bytes > REKEY_BYTES:
            self._sent_bytes = 0
            self._connection.sendall(Frame(REKEY).pack())
            plain = self._connection.unwrap()
            self._connection = self._contexts.client.wrap_socket(plain)

    def _say_goodbye(self) -> None:
        """The other end closes when it has read everything: then nothing is under way any more."""
        with contextlib.suppress(OSError, ValueError):
            self._connection.sendall(Frame(GOODBYE).pack())
            self._connection.settimeout(_GOODBYE_S)
            self._connection.recv(1)


class Inbox(Protocol):
    """Destination of a receiver's frames."""

    def heard(self, peer: int, frame: Frame) -> memoryview | None:
        """A frame has come; the place for its bytes, if it has some. ConnectionError if it makes no sense."""

    def landed(self, peer: int, frame: Frame) -> None:
        """The bytes of a frame have come."""

    def ended(self, peer: int, cause: str) -> None:
        """Nothing comes from this peer any more; an empty cause: it has said good-bye."""


class Receiver:
    """The receiving end: reads all the time, whatever this worker does."""

    def __init__(self, connection: ssl.SSLSocket, contexts: Contexts, peer: int, inbox: Inbox) -> None:
        self._connection, self._contexts, self._peer, self._inbox = connection, contexts, peer, inbox
        self._thread = threading.Thread(target=self._run, name=f"thinwire-tls-from-{peer}", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        shut_down(self._connection)

    def join(self, deadline_s: float) -> None:
        self._thread.join(deadline_s)

    def _run(self) -> None:
        cause, header = "", memoryview(bytearray(_FRAME.size))
        try:
            while True:
                self._read(header)
                frame = Frame(*_FRAME.unpack(header))
                if frame.kind == GOODBYE:
                    break
                if frame.kind == REKEY:
                    plain = self._connection.unwrap()
                    self._connection = self._contexts.server.wrap_socket(plain, server_side=True)
                    continue
                if (place := self._inbox.heard(self._peer, frame)) is not None:
                    self._read(place)
                    self._inbox.landed(self._peer, frame)
        except (OSError, ValueError) as error:
            cause = str(error) or type(error).__name__
        self._connection.close()
        self._inbox.ended(self._peer, cause)

    def _read(self, place: memoryview) -> None:
        done, size = 0, len(place)
        while done < size:
            count = self._connection.recv_into(place[done:])
            if not count:
                raise ConnectionError("the connection ended")
            done += count
