"""Workers that watch each other: several watches in one process, over the real sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from thinwire.errors import PeerError, PeerLate, PeerLost
from thinwire.wire import control
from thinwire.wire.watch import Watch

LONG_S = 60.0
"""Longer than any test waits."""


def watches(world_size: int, store: HashStore | None = None, silence_s: float = LONG_S) -> list[Watch]:
    store = store or HashStore()
    ranks = list(range(world_size))
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: Watch(store, "test", rank, ranks, LONG_S, silence_s), ranks))


@pytest.fixture
def three() -> Iterator[list[Watch]]:
    made = watches(3)
    yield made
    for watch in made:
        watch.stop()


def heard(watch: Watch) -> Callable[[], PeerError | None]:
    """What the watch tells its listeners, once it does."""
    told: list[PeerError] = []
    watch.when_lost(told.append)
    return lambda: told[0] if told else None


def eventually(call: Callable[[], PeerError | None]) -> PeerError:
    deadline = time.monotonic() + LONG_S
    while (error := call()) is None:
        assert time.monotonic() < deadline, "nobody was told"
        time.sleep(0.01)
    return error


def test_everyone_hears_the_cause_that_one_rings(three: list[Watch]) -> None:
    listeners = [heard(watch) for watch in three]
    three[1].ring(PeerLost("worker 1 left", rank=1, host="there", hint="look"))
    for listener in listeners:
        error = eventually(listener)
        assert (str(error), error.rank, error.host) == ("worker 1 left\nhint: look", 1, "there")


def test_who_leaves_because_of_another_names_that_one(three: list[Watch]) -> None:
    """The good-bye may overtake the first alarm, which comes by another connection."""
    listener = heard(three[2])
    three[0]._tell_listeners(PeerLost("worker 1 left", rank=1, host="there"))  # heard by worker 0 only
    three[0].stop()
    assert eventually(listener).rank == 1


def test_who_has_ended_because_of_another_is_not_missed(three: list[Watch]) -> None:
    """The training thread may ask before it is told of the alarm, and after the good-bye has come."""
    listener = heard(three[2])
    three[0].ring(PeerLost("worker 1 left", rank=1, host="there"))
    three[0].stop()
    eventually(listener)
    three[2]._members[0].doing = "left"  # as the good-bye says, which comes next
    assert eventually(lambda: three[2].missing(7)).rank == 1


def test_who_has_ended_is_missed_and_not_lost(three: list[Watch]) -> None:
    three[0].tell(7, "")
    three[0].stop()
    error = eventually(lambda: three[1].missing(7))
    assert "worker 0 on " in str(error)
    assert "has ended after step 7" in str(error)


def test_who_leaves_early_is_missed_by_those_who_go_on(three: list[Watch]) -> None:
    three[0].tell(5, "detaching")
    assert eventually(lambda: three[1].missing(5)).rank == 0
    assert three[1].missing(4) is None
    three[1].tell(5, "detaching")
    assert three[1].missing(5) is None


def test_a_broken_connection_is_a_lost_worker(three: list[Watch]) -> None:
    listeners = [heard(watch) for watch in three[1:]]
    three[0]._stopped = True  # it no longer beats, and is cut off without a good-bye
    three[0]._thread.join()
    for channel in list(three[0]._mesh._channels.values()):
        channel.socket.shutdown(socket.SHUT_RDWR)
    for listener in listeners:
        error = eventually(listener)
        assert error.rank == 0
        assert "its connections broke" in str(error)


def test_silence_is_a_lost_worker() -> None:
    made = watches(3, silence_s=2.0)
    listeners = [heard(watch) for watch in made[1:]]
    made[0]._stopped = True
    for listener in listeners:
        error = eventually(listener)
        assert error.rank == 0
        assert "no sign of life for 2 s" in str(error)
    made[0]._stopped = False
    for watch in made:
        watch.stop()


def test_junk_from_a_peer_changes_nothing(three: list[Watch]) -> None:
    listener = heard(three[1])
    for message in (["alarm"], ["alarm", 1, 2, 3, 4, 5], ["beat", "x", 3], ["what"], ["beat", None, None]):
        three[0]._mesh.send(message)
    for channel in three[0]._mesh._channels.values():
        channel.socket.send(b"\xff{]\n[]\n7\n" + b"[" * 5000 + b"\n")
    three[0].ring(PeerLate("the first that means something", rank=0))
    assert eventually(listener).message == "the first that means something"


def test_a_stranger_finds_no_way_in() -> None:
    store = HashStore()
    first: list[Watch] = []
    ranks = [0, 1]
    thread = threading.Thread(target=lambda: first.append(Watch(store, "test", 0, ranks, LONG_S, LONG_S)))
    thread.start()
    host, port, _ = json.loads(store.get("thinwire/test/control/0"))
    for said in (
        b'["guess", 1, []]\n',
        b"[1, 1, []]\n",
        b"\n",
        b"{}\n",
        '["é", 1, []]\n'.encode(),
        b"[" * control.LONGEST,
    ):
        with socket.create_connection((host, port)) as stranger:
            stranger.sendall(said)
            assert closes(stranger)
    second = Watch(store, "test", 1, ranks, LONG_S, LONG_S)
    thread.join()
    assert len(first[0].places) == 2
    first[0].stop()
    second.stop()


def closes(connection: socket.socket) -> bool:
    connection.settimeout(LONG_S)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(PeerLate, match=r"worker 1 has waited 0.2 s for workers \[0, 2\] to attach") as raised:
        Watch(HashStore(), "test", 1, [0, 1, 2], 0.2, LONG_S)
    assert raised.value.rank == 0
