"""Connecting that was given up, in one process: what is connected after all is ended."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import pytest
from torch._C._distributed_c10d import HashStore

from tests.wire.tls import SOON_S, contexts
from thinwire.errors import PeerLost
from thinwire.wire import control
from thinwire.wire.connect import connect_members
from thinwire.wire.tls.files import Contexts

__all__ = ["contexts"]  # a fixture


def test_who_has_given_up_is_not_watched_by_those_who_come_later(contexts: Contexts) -> None:
    """A change of workers while they tell each other where they are: one has heard of it first."""
    store, error = HashStore(), PeerLost("worker 2 is lost", rank=2)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(PeerLost, match="worker 2 is lost"):
        connect_members(store, 0, 2, timeout_s=30, silence_s=10, lost=lambda: error, tls=contexts)
    about = [socket.gethostname(), "", os.getpid()]
    mesh = control.connect(store, "thinwire/members/", 1, 2, about, SOON_S)
    closed: list[int] = []
    deadline = time.monotonic() + SOON_S
    while not closed and time.monotonic() < deadline:
        mesh.poll(0.1, lambda rank, message: None, closed.append)
    assert closed == [0]
    mesh.close()
    wait_until(lambda: threading.active_count() == threads)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
