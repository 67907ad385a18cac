"""How the workers of a world connect: each opens a door, and tells where through the store that joins them.

A connection counts when its receiver has said so: in TLS 1.3 whoever connects has ended its handshake before
the other side has looked at its certificate. The door is closed when all have come.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from thinwire.errors import PeerDiffers, PeerError, PeerLate
from thinwire.wire.control import LONGEST, open_door, own_address, parse
from thinwire.wire.tls.files import Contexts
from thinwire.wire.tls.mesh import TlsMesh

_log = logging.getLogger("thinwire")
_HELLO_S = 5.0
"""Time for a handshake; a port scanner gets no more of ours."""
_MOST_GUESTS = 64
"""Handshakes under way at one time."""
_PAUSE_S, _RETRY_S = 0.01, 0.1
_WELCOME = b"!"
_MOST_TOLD = 1000
_told: set[str] = set()
"""Addresses of strangers in the log of this process; every change of the workers has doors of its own."""


@dataclass
class Door:
    """Accepts a connection from each other worker, and refuses everybody else."""

    address: str
    expected: frozenset[int]
    """Workers that are to come."""
    contexts: Contexts
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Token of this meeting, unlike that of another run, or an earlier meeting, with the same certificate."""

    def __post_init__(self) -> None:
        self._socket = open_door(self.address, backlog=128)
        self.port: int = self._socket.getsockname()[1]
        self.came: dict[int, ssl.SSLSocket] = {}
        self.changed = threading.Condition()
        self._guests = 0
        self._open = True
        self._thread = threading.Thread(target=self._accept, name="thinwire-tls-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self.changed:
            self._open = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _accept(self) -> None:
        while self._open:
            try:
                connection, address = self._socket.accept()
            except OSError:  # closed, or no descriptors are left
                time.sleep(_PAUSE_S)
                continue
            if self._guests >= _MOST_GUESTS:
                connection.close()
                continue
            self._guests += 1
            arguments = connection, str(address[0])
            threading.Thread(target=self._greet, args=arguments, name="thinwire-guest", daemon=True).start()

    def _greet(self, connection: socket.socket, address: str) -> None:
        secured: socket.socket = connection
        try:
            connection.settimeout(_HELLO_S)
            secured = self.contexts.server.wrap_socket(connection, server_side=True)
            worker = self._worker_of(_read_line(secured))
            secured.sendall(_WELCOME)
            with self.changed:
                if not self._open:
                    raise ConnectionError("the door is closed")
                if worker in self.came:  # it has given up that one
                    self.came[worker].close()
                self.came[worker] = secured
                self.changed.notify_all()
        except (OSError, ValueError) as error:
            secured.close()
            self._note_stranger(address, error)
        finally:
            self._guests -= 1

    def _worker_of(self, line: bytes) -> int:
        match parse(line):
            case ["thinwire", str(token), int(worker)] if worker in self.expected:
                if secrets.compare_digest(token.encode(), self.token.encode()):
                    return worker
        raise ConnectionError("it is no worker of this meeting")

    def _note_stranger(self, address: str, error: Exception) -> None:
        if self._open and address not in _told and len(_told) < _MOST_TOLD:
            _told.add(address)
            _log.warning("refused a TLS connection from %s: %s; told once per address", address, error)


def meet(store: Store, rank: int, world_size: int, contexts: Contexts, timeout_s: float) -> TlsMesh:
    """Connect to all others both ways. PeerLate names who has not come, PeerDiffers who has another
    certificate."""
    deadline, others = time.monotonic() + timeout_s, [each for each in range(world_size) if each != rank]
    door = Door(own_address(store), frozenset(others), contexts)
    outgoing: dict[int, ssl.SSLSocket] = {}
    errors: list[PeerError] = []

    def reach(other: int, host: str, port: int, token: str) -> None:
        while other not in outgoing and not errors:
            try:
                outgoing[other] = _connect(host, port, token, rank, contexts.client, deadline)
            except OSError as error:
                if _is_refusal(error) or time.monotonic() + _RETRY_S > deadline:
                    errors.append(_blame(other, host, error))
                else:
                    time.sleep(_RETRY_S)  # too many are at its door
        with door.changed:
            door.changed.notify_all()

    threads: list[threading.Thread] = []
    try:
        store.set(f"tls/{rank}", json.dumps([door.address, door.port, door.token]))
        for other, (host, port, token) in _addresses(store, others, deadline).items():
            threads.append(threading.Thread(target=reach, args=(other, host, port, token), daemon=True))
            threads[-1].start()
        with door.changed:
            while len(outgoing) < len(others) or len(door.came) < len(others):
                left_s = deadline - time.monotonic()
                if errors or left_s <= 0:
                    raise errors[0] if errors else _late(others, outgoing, door, timeout_s)
                door.changed.wait(left_s)
    except BaseException:
        door.close()
        for thread in threads:
            thread.join()
        for each in (*outgoing.values(), *door.came.values()):
            each.close()
        raise
    door.close()
    for thread in threads:
        thread.join()
    for each in (*outgoing.values(), *door.came.values()):
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return TlsMesh(outgoing, door.came, contexts)


def _addresses(store: Store, others: Sequence[int], deadline: float) -> dict[int, tuple[str, int, str]]:
    found = {}
    for other in others:
        key = f"tls/{other}"
        try:
            store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            host, port, token = json.loads(store.get(key))
        except (RuntimeError, ValueError, TypeError) as error:
            raise PeerLate(
                f"worker {other} has not opened a door for TLS connections",
                rank=other,
                hint=f"see its own output: does it have wire='tls' too? ({str(error).splitlines()[0]})",
            ) from error
        found[other] = str(host), int(port), str(token)
    return found


def _connect(
    host: str, port: int, token: str, rank: int, context: ssl.SSLContext, deadline: float
) -> ssl.SSLSocket:
    within_s = max(0.01, deadline - time.monotonic())
    connection = socket.create_connection((host, port), timeout=within_s)
    try:
        secured = context.wrap_socket(connection)
    except BaseException:
        connection.close()
        raise
    try:
        secured.sendall(json.dumps(["thinwire", token, rank]).encode() + b"\n")
        if secured.recv(1) != _WELCOME:
            raise ConnectionError("it closed the connection")
    except BaseException:
        secured.close()
        raise
    return secured


def _is_refusal(error: OSError) -> bool:
    """Whether one side does not accept the other's certificate."""
    alert = isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")
    return alert or isinstance(error, ssl.SSLCertVerificationError)


def _blame(other: int, host: str, error: OSError) -> PeerError:
    if _is_refusal(error):
        reason = getattr(error, "verify_message", "") or getattr(error, "reason", "")
        return PeerDiffers(
            f"worker {other} at {host} and this worker do not accept each other's certificate: {reason}",
            rank=other,
            host=host,
            hint="copy the same file of `thinwire keys new --tls` to all workers; if it has expired, make a "
            "new one; if it is not valid yet, set the clocks",
        )
    return PeerLate(
        f"worker {other} at {host} cannot be reached by TLS: {error}",
        rank=other,
        host=host,
        hint="see its own output, and whether a firewall is between (workers take any free port)",
    )


def _late(
    others: Sequence[int], outgoing: dict[int, ssl.SSLSocket], door: Door, timeout_s: float
) -> PeerLate:
    absent = [other for other in others if other not in outgoing or other not in door.came]
    return PeerLate(
        f"waited {timeout_s:g} s for TLS connections with workers {absent}",
        rank=absent[0],
        hint="see the output of that worker, and whether it can be reached from here",
    )


def _read_line(connection: ssl.SSLSocket) -> bytes:
    line, deadline = b"", time.monotonic() + _HELLO_S
    while not line.endswith(b"\n") and len(line) < LONGEST:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        if not (data := connection.recv(LONGEST)):
            break
        line += data
    return line
