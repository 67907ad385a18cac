"""The sockets that torch opens for us, to be shut down when something blocks in them for good.

Gloo can neither abort an operation nor destroy a group with one under way, and a client of the store waits
without a limit. A socket that is shut down looks to them like a peer that is gone: whoever waits comes back
with an error, in a thread that can still run.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Opened = list[tuple[int, int]]
"""Descriptors with their inodes: a number may be used again for something else."""


def opened_by(call: Callable[[], T]) -> tuple[T, Opened]:
    """The result of a call, and the sockets that are open after it and were not before.

    Those of a call beside it count too: lanes that connect at one time belong together, and end together.
    """
    before = set(_sockets())
    result = call()
    return result, [each for each in _sockets() if each not in before]


def shut_down(opened: Opened) -> None:
    """End the connections of these sockets, as if the peers had."""
    for descriptor, inode in opened:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                with socket.socket(fileno=os.dup(descriptor)) as each:
                    each.getpeername()  # none: it listens, and Gloo aborts the process if that one fails
                    each.shutdown(socket.SHUT_RDWR)


def _sockets() -> Opened:
    found: Opened = []
    try:
        numbers = [int(name) for name in os.listdir("/dev/fd")]
    except (OSError, ValueError):
        return found
    for number in numbers:
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                found.append((number, status.st_ino))
    return found
