"""Workers that watch each other: several watches in one process, over the real sockets."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
from torch._C._distributed_c10d import HashStore

from thinwire.errors import PeerDiffers, PeerError, PeerLate, PeerLost
from thinwire.wire import connect, control
from thinwire.wire import watch as watch_module
from thinwire.wire.base import DETACHING, FAILING, IN_CALL, LEFT, WAITING, Status
from thinwire.wire.watch import Watch, WatchedWorker

T = TypeVar("T")
LONG_S = 60.0
"""Longer than any test waits."""


def watches(world_size: int, store: HashStore | None = None, silence_s: float = LONG_S) -> list[Watch]:
    store = store or HashStore()
    ranks = list(range(world_size))
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: Watch(store, "test", rank, ranks, LONG_S, silence_s), ranks))


@pytest.fixture(autouse=True)
def beats_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "BEAT_S", 0.05)


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


def eventually(call: Callable[[], T | None]) -> T:
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
    three[0]._claim(PeerLost("worker 1 left", rank=1, host="there"))  # heard by worker 0 only
    three[0].stop()
    assert eventually(listener).rank == 1


def test_who_has_ended_because_of_another_is_not_missed(three: list[Watch]) -> None:
    """The training thread may ask before it is told of the alarm, and after the good-bye has come."""
    listener = heard(three[2])
    three[0].ring(PeerLost("worker 1 left", rank=1, host="there"))
    three[0].stop()
    eventually(listener)
    three[2]._members[0].status = Status(doing=LEFT)  # as the good-bye says, which comes next
    assert eventually(three[2].missing).rank == 1


def test_who_is_told_while_it_looks_around_names_the_first_cause(
    three: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm, and the good-bye of one who ends because of it, come while the training thread asks who is
    missing: neither it nor anybody it tells takes that one for the culprit."""
    three[0]._others.reverse()
    first_cause = PeerLost("worker 1 left", rank=1, host="there")
    absence = Watch._absence

    def look_slowly(watch: Watch, other: WatchedWorker, awaited_step: int) -> PeerError | None:
        if watch is three[0] and watch._lost is None:
            watch._claim(first_cause)  # of which the listeners will know in a moment
            watch._members[2].status = Status(doing=LEFT)
        return absence(watch, other, awaited_step)

    monkeypatch.setattr(Watch, "_absence", look_slowly)
    assert three[0].missing() is first_cause
    other = heard(three[1])
    assert three[0].ring(PeerLost("worker 2 has ended", rank=2)) is first_cause
    three[0].stop()
    assert eventually(other).rank == 1


def test_a_failed_operation_is_not_explained_before_all_is_heard(
    three: list[Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the thread that listens may run late: silence for a moment means nothing."""
    monkeypatch.setattr(watch_module, "_NOTICE_S", 0.0)
    hear, late, may_hear = Watch._hear, threading.Event(), threading.Event()

    def hear_late(watch: Watch, rank: int, message: control.Message) -> None:
        if watch is three[0]:
            late.set()
            may_hear.wait(LONG_S)
        hear(watch, rank, message)

    monkeypatch.setattr(Watch, "_hear", hear_late)
    assert late.wait(LONG_S)
    with ThreadPoolExecutor(1) as pool:
        explained = pool.submit(three[0].explain, RuntimeError("connection closed"))
        three[2].ring(PeerLost("worker 2 left", rank=2))
        time.sleep(0.3)
        assert not explained.done()
        may_hear.set()
        assert explained.result(LONG_S).rank == 2


def test_who_is_on_its_own_is_late_and_not_who_waits_in_the_same_call(three: list[Watch]) -> None:
    waiting = Status(steps=5, calls=1, doing=f"{IN_CALL}link.all_reduce")
    three[0].tell(waiting)
    three[1].tell(waiting)
    three[2].tell(Status(steps=5))
    eventually(lambda: three[1]._members[0].status == waiting or None)
    assert three[1].late("waited").rank == 2
    leaving = Status(steps=5, calls=1, doing=DETACHING)
    three[0].tell(leaving)
    three[1].tell(leaving)
    eventually(lambda: three[1]._members[0].status == leaving or None)
    assert three[1].late("waited").rank == 2
    three[2].tell(Status(steps=5, doing=WAITING))
    eventually(lambda: three[1]._members[2].status.doing == WAITING or None)
    assert three[1].late("waited").rank == 2  # where nobody else is


@pytest.mark.parametrize(
    ("mine", "named"),
    [
        (Status(5, 1, 0, WAITING), True),  # in a backward after the call
        (Status(6, 0, 0, WAITING), True),
        (Status(5, 0, 0, WAITING), False),  # for what belongs to the step before the call
        (Status(4, 2, 0, WAITING), False),  # in that step
        (Status(5, 1, 1, WAITING), False),  # the call is over, and what is known of the other is old
        (Status(5, 1, 0, ""), False),  # waits for nobody
        (Status(5, 1, 1, f"{IN_CALL}link.all_reduce"), False),
    ],
)
def test_a_call_that_was_left_out_is_noticed_at_once(three: list[Watch], mine: Status, named: bool) -> None:
    theirs = Status(5, 0, 1, f"{IN_CALL}link.all_reduce")
    three[0].tell(theirs)
    three[1].tell(mine)
    eventually(lambda: three[1]._members[0].status == theirs or None)
    error = three[1].missing()
    assert (error is not None) == named
    if error is not None:
        assert isinstance(error, PeerDiffers)
        assert "is in link.all_reduce at step 5, and worker 1 has gone on to step" in str(error)
        listener = heard(three[2])
        three[1].ring(error)
        assert isinstance(eventually(listener), PeerDiffers)


def test_who_has_ended_is_missed_and_not_lost(three: list[Watch]) -> None:
    three[0].tell(Status(steps=7))
    three[0].stop()
    error = eventually(three[1].missing)
    assert "worker 0 on " in str(error)
    assert "has ended after step 7" in str(error)


def test_who_leaves_early_is_missed_by_those_who_go_on(three: list[Watch]) -> None:
    three[0].tell(Status(steps=5, doing=DETACHING))
    three[1].tell(Status(steps=5, doing=WAITING))
    assert "leaves after 5 steps, this one is at step 6" in str(eventually(three[1].missing))
    for fine in (Status(4, doing=WAITING), Status(5, doing=DETACHING), Status(5)):
        three[1].tell(fine)
        assert three[1].missing() is None


def test_who_leaves_with_fewer_steps_is_missed_by_those_who_wait_for_its_part_of_the_last_one(
    three: list[Watch],
) -> None:
    three[0].tell(Status(steps=5, doing=DETACHING))
    three[1].tell(Status(steps=6, doing=DETACHING))
    assert "leaves after 5 steps, this one after 6" in str(
        eventually(lambda: three[1].missing(awaited_step=6))
    )
    assert three[1].missing(awaited_step=5) is None  # a step that both have made
    assert three[1].missing() is None


def test_who_leaves_with_an_error_is_missed_with_that_error(three: list[Watch]) -> None:
    three[0].tell(Status(steps=5, doing=f"{FAILING}ArithmeticError: the batch was bad"))
    three[1].tell(Status(steps=5, doing=WAITING))
    error = eventually(three[1].missing)
    assert "left at step 5 with ArithmeticError: the batch was bad" in str(error)
    assert "same number of steps" not in str(error)


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
        b'["\\ud800", 1, []]\n',  # half a character
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


def test_members_that_have_changed_are_the_cause_of_a_door_that_stays_shut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An elastic worker goes on after the first; it ended with the second."""
    changed = list[PeerError]()

    def shut(ranks: object, watch: Watch, timeout_s: float, source: object) -> object:
        changed.append(PeerLost("the members have changed"))
        raise watch.ring(PeerLate("worker 1 has not opened a door"))

    monkeypatch.setattr(connect, "_connected_lane", shut)
    with pytest.raises(PeerLost, match="members have changed"):
        connect.connect_members(
            *(HashStore(), 0, 1),
            timeout_s=LONG_S,
            silence_s=LONG_S,
            lost=lambda: changed[0] if changed else None,
        )


def test_a_call_that_is_given_up_keeps_its_thread_no_longer_than_it_takes() -> None:
    def under_way() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "thinwire-connect"]

    go = threading.Event()
    with pytest.raises(PeerLost):
        connect._within(LONG_S, go.wait, lambda: PeerLost("the members have changed"))
    assert under_way()
    go.set()
    eventually(lambda: None if under_way() else True)
