"""How workers meet for their control connections: who is at a door in the place of a worker."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from tests.wire.tls import contexts, in_threads
from tests.worlds import has_ipv6
from thinwire.errors import PeerLate
from thinwire.wire import control
from thinwire.wire.tls.files import Contexts
from thinwire.wire.tls.meeting import meet

__all__ = ["contexts"]  # a fixture
SOON_S = 20.0


def test_another_process_at_the_door_of_a_worker_is_named_as_its_absence() -> None:
    """One that has died, and whose port somebody else has now."""
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as door:
        store.set("control/0", json.dumps(["127.0.0.1", door.getsockname()[1], ""]))

        def answer() -> None:
            guest, _ = door.accept()
            with guest:
                guest.recv(1000)
                guest.sendall(b"HTTP/1.1 400 Bad Request\n")

        other = threading.Thread(target=answer)
        other.start()
        with pytest.raises(PeerLate, match=r"for workers \[0\] to attach"):
            control.connect(store, "", 1, 2, ["w1"], 1.0)
        other.join(SOON_S)


def test_strangers_who_say_nothing_at_the_door_hold_up_nobody() -> None:
    """A port scanner that is there first: each used to be listened to for seconds before a worker was."""
    store = HashStore()
    silent: list[socket.socket] = []

    def come(rank: int) -> control.Mesh:
        if rank == 1:
            store.wait(["control/0"], timedelta(seconds=SOON_S))
            host, port, _ = json.loads(store.get("control/0"))
            silent.extend(socket.create_connection((host, port)) for _ in range(3))
            silent[0].sendall(b'["half a line')
            silent[1].sendall(b"GET / HTTP/1.1\r\n")
        return control.connect(store, "", rank, 2, [f"w{rank}"], 2 * SOON_S)

    for mesh in in_threads(come, 2):
        assert mesh.abouts == [["w0"], ["w1"]]
        mesh.close()
    for each in silent:
        each.settimeout(SOON_S)
        with each, contextlib.suppress(ConnectionError):
            assert each.recv(1) == b""  # it was sent away


def test_of_many_strangers_at_once_the_first_are_sent_away() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as door:
        callers = control.callers(door, time.monotonic() + SOON_S, 10)
        strangers = [socket.create_connection(door.getsockname()) for _ in range(11)]
        with socket.create_connection(door.getsockname()) as worker:
            worker.sendall(b'["token", 1, ["about"]]\nnext')
            guest, hello = next(callers)
            assert hello == ("token", 1, ["about"])
            assert guest.recv(100) == b"next"  # what comes after the greeting is still there
            guest.close()
        callers.close()
        for each in strangers:
            each.settimeout(SOON_S)
            with each, contextlib.suppress(ConnectionError):
                assert each.recv(1) == b""


class StoreAt(HashStore):
    """A store on a host with this address."""

    host, port = "::1", 9


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_workers_meet_where_the_store_is_reached_by_ipv6() -> None:
    """As where MASTER_ADDR is localhost and that is ::1 first; before, attach could not open its door."""
    store = StoreAt()
    made = in_threads(lambda rank: control.connect(store, "", rank, 2, [f"w{rank}"], SOON_S), 2)
    assert json.loads(store.get("control/0"))[0] == "::1"
    for mesh in made:
        assert mesh.abouts == [["w0"], ["w1"]]
        mesh.close()


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_tls_connects_by_ipv6(contexts: Contexts) -> None:
    store = StoreAt()
    for mesh in in_threads(lambda rank: meet(store, rank, 2, contexts, SOON_S), 2):
        mesh.abort()
        mesh.join()
