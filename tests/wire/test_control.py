"""How workers meet for their control connections: who is at a door in the place of a worker."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from torch._C._distributed_c10d import HashStore

from thinwire.errors import PeerLate
from thinwire.wire import control

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
