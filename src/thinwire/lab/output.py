"""What comes out of workers: lines for the user, requests for the lab; no torch."""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable
from typing import Any

from thinwire.errors import ThinwireError


class Lines:
    """Passes the lines of one pipe on to one of our own outputs, each with a prefix."""

    def __init__(self, source: int, target: int, prefix: str, selector: selectors.BaseSelector) -> None:
        self._source = source
        self._target = target
        self._prefix = prefix.encode()
        self._rest = b""
        self._selector = selector
        os.set_blocking(source, False)
        selector.register(source, selectors.EVENT_READ, self._ready)

    def _ready(self) -> None:
        data = os.read(self._source, 1 << 16)
        if not data:
            self._selector.unregister(self._source)
            os.close(self._source)
            data = b"\n" if self._rest else b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        _write_all(self._target, b"".join(self._prefix + line + b"\n" for line in lines))

    @staticmethod
    def open_in(selector: selectors.BaseSelector) -> bool:
        """Whether any worker's output is still open."""
        return any(
            isinstance(getattr(key.data, "__self__", None), Lines) for key in selector.get_map().values()
        )


def _write_all(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BrokenPipeError:
            return  # the reader (head, less) has seen enough; the run goes on


def answer_requests(
    connection: socket.socket, selector: selectors.BaseSelector, answer: Callable[[dict[str, Any]], object]
) -> Callable[[], None]:
    """Answer JSON lines that arrive on `connection`; returns what closes it."""
    rest = b""

    def ready() -> None:
        nonlocal rest
        data = _receive(connection)
        if not data:
            selector.unregister(connection)
            connection.close()
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            try:
                reply: dict[str, object] = {"answer": answer(json.loads(line))}
            except (ThinwireError, KeyError, ValueError) as problem:
                reply = {"error": str(problem)}
            connection.sendall(json.dumps(reply).encode() + b"\n")

    selector.register(connection, selectors.EVENT_READ, ready)
    return connection.close


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionResetError:
        return b""
