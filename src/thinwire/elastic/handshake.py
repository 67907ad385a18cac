"""Who may talk: a challenge that only holders of the run's key can answer, and messages that carry a proof.

    door    ["thinwire", nonce, generation]
    client  ["hello", member, nonce, proof over both nonces, the generation and the member]
    door    ["welcome", member, proof over all of that and its own member]

Nonces are new for every connection, so nothing recorded can be replayed. After it each message has a proof
over a key of this connection, its direction and its number. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator
from typing import Any

from thinwire.elastic.membership import Member
from thinwire.errors import DataError
from thinwire.wire.control import LONGEST, Message, parse

HELLO_S = 5.0
"""For a handshake; a port scanner gets no more of our time."""
_PROOF_BYTES = 16
_MOST_WAITING_BYTES = 1 << 20
"""A peer that reads so much too slowly is dropped."""


class Stranger(Exception):
    """What is at the other end does not know the key, or is none of us."""


class Silence(Stranger):
    """It connected, and left without a word."""


def proof(key: bytes, *parts: object) -> str:
    """Over the parts, each in its place: no two lists of parts look the same as JSON."""
    text = json.dumps(parts).encode()
    return hmac.new(key, text, hashlib.sha256).digest()[:_PROOF_BYTES].hex()


class KeyedChannel:
    """An authenticated connection to one peer, which never blocks."""

    def __init__(self, connection: socket.socket, peer: Member, session: bytes, *, at_door: bool) -> None:
        self.peer, self.socket = peer, connection
        self.session = session
        self._ways = ("door", "client") if at_door else ("client", "door")
        self._num_sent = self._num_received = 0
        self._inbox = self._outbox = b""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def unsent(self) -> bool:
        return bool(self._outbox)

    def send(self, message: Message) -> bool:
        """Queue a message, and send as much as goes at once; whether the connection still stands."""
        text = json.dumps(message)
        shown = proof(self.session, self._ways[0], self._num_sent, text)
        self._num_sent += 1
        self._outbox += f"{shown} {text}\n".encode()
        return self.flush()

    def flush(self) -> bool:
        try:
            while self._outbox:
                self._outbox = self._outbox[self.socket.send(self._outbox) :]
        except (BlockingIOError, InterruptedError):
            return len(self._outbox) <= _MOST_WAITING_BYTES
        except OSError:
            return False
        return True

    def receive(self) -> tuple[list[Message], bool]:
        """What has come, and whether the connection still stands: one wrong proof ends it."""
        try:
            data = self.socket.recv(LONGEST)
        except (BlockingIOError, InterruptedError):
            return [], True
        except OSError:
            return [], False
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        messages: list[Message] = []
        for line in lines:
            message = self._open(line)
            if message is None:
                return messages, False
            messages.append(message)
        return messages, bool(data) and len(self._inbox) <= LONGEST

    def _open(self, line: bytes) -> Message | None:
        shown, _, text = line.partition(b" ")
        try:
            expected = proof(self.session, self._ways[1], self._num_received, text.decode())
        except UnicodeDecodeError:
            return None
        if not hmac.compare_digest(shown, expected.encode()):
            return None
        self._num_received += 1
        return parse(text)


def answer_door(connection: socket.socket, me: Member, key: bytes) -> KeyedChannel:
    """The client's part; Stranger, and the connection is closed, if the door does not know the key."""
    with _closing_on_error(connection):
        return _answer_door(connection, me, key)


def open_door(connection: socket.socket, me: Member, key: bytes, generation: int) -> KeyedChannel:
    """The door's part; Stranger, and the connection is closed, if the client does not know the key."""
    with _closing_on_error(connection):
        return _open_door(connection, me, key, generation)


@contextlib.contextmanager
def _closing_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # JSON may hold half a character, which cannot be encoded
        connection.close()
        raise Stranger("what it says makes no sense") from error
    except BaseException:
        connection.close()
        raise


def _answer_door(connection: socket.socket, me: Member, key: bytes) -> KeyedChannel:
    deadline = time.monotonic() + HELLO_S
    match _read(connection, deadline):
        case ["thinwire", str(theirs), int(generation)]:
            mine = secrets.token_hex(16)
            about = [theirs, mine, generation, me.to_json()]
            _write(connection, ["hello", me.to_json(), mine, proof(key, "client", *about)])
        case _:
            raise Stranger("what listens there is no worker")
    match _read(connection, deadline):
        case ["welcome", [*_] as member, str(shown)]:
            peer = _member(member)
            if hmac.compare_digest(shown.encode(), proof(key, "door", *about, peer.to_json()).encode()):
                return KeyedChannel(connection, peer, bytes.fromhex(_session(key, about)), at_door=False)
    raise Stranger("what listens there does not know the key of this run")


def _open_door(connection: socket.socket, me: Member, key: bytes, generation: int) -> KeyedChannel:
    deadline, mine = time.monotonic() + HELLO_S, secrets.token_hex(16)
    _write(connection, ["thinwire", mine, generation])
    match _read(connection, deadline):
        case ["hello", [*_] as member, str(theirs), str(shown)] if len(theirs) <= 64:
            peer = _member(member)
            about = [mine, theirs, generation, peer.to_json()]
            if hmac.compare_digest(shown.encode(), proof(key, "client", *about).encode()):
                shown = proof(key, "door", *about, me.to_json())
                _write(connection, ["welcome", me.to_json(), shown])
                return KeyedChannel(connection, peer, bytes.fromhex(_session(key, about)), at_door=True)
            raise Stranger("it does not know the key of this run")
    raise Stranger("it is no worker")


def _session(key: bytes, about: list[Any]) -> str:
    return proof(key, "session", *about)


def _member(value: object) -> Member:
    try:
        return Member.from_json(value)
    except DataError as error:
        raise Stranger("it is no worker") from error


def _write(connection: socket.socket, message: Message) -> None:
    connection.settimeout(HELLO_S)
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, deadline: float) -> Message | None:
    """One line; Stranger if none comes in time."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) <= LONGEST:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            byte = connection.recv(1)  # what comes after the line belongs to the channel
            if not byte:
                break
            line += byte
    except OSError:
        pass  # it is judged by what it has said
    if not line:
        raise Silence("it said nothing")
    return parse(line)
