"""How workers meet for their control connections: who is at a door in the place of a worker."""

from __future__ import annotations

import json
import socket
import threading

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
