"""Control sockets of an elastic world, in one process: deaths, good-byes, joiners, silence and strangers."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.distributed_c10d import PrefixStore

from benchmarks.strangers import random_value
from thinwire.elastic.handshake import Stranger, answer_door, open_door
from thinwire.elastic.joining import Joining
from thinwire.elastic.membership import Member, Membership
from thinwire.elastic.peers import PeerConnections
from thinwire.elastic.store import PeerStore
from thinwire.errors import PeerLost

KEY = b"k" * 32
SILENCE_S = 3.0
SOON_S = 20.0


class World:
    """Peers in one process, each with sockets of its own."""

    def __init__(self) -> None:
        self.peers: list[PeerConnections] = []

    def make(self, name: str, key: bytes = KEY, silence_s: float = SILENCE_S) -> PeerConnections:
        door = socket.create_server(("127.0.0.1", 0))
        me = Member(name, "127.0.0.1", door.getsockname()[1])
        self.peers.append(PeerConnections(door, me, key, silence_s=silence_s))
        return self.peers[-1]

    def start(self, size: int) -> list[PeerConnections]:
        made = [self.make(f"w{i}") for i in range(size)]
        membership = Membership(1, tuple(each.me for each in made), "run")
        for each in made:
            each.start(membership)
        for each in made:
            wait_until(lambda each=each: len(each._channels) == size - 1)  # type: ignore[misc]
        return made


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    for each in made.peers:
        each.stop()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, "not so after a while"
        time.sleep(0.01)


def wait_for_members(peers: list[PeerConnections], ids: list[str]) -> Membership:
    """Until all of them are in one membership of these."""

    def agree() -> bool:
        found = {each.roster.membership for each in peers}
        one = found.pop()
        return not found and one is not None and one.ids == ids

    wait_until(agree)
    assert peers[0].roster.membership is not None
    return peers[0].roster.membership


def test_after_a_death_the_others_agree_within_a_moment(world: World) -> None:
    a, b, c, d = world.start(4)
    a.stop()  # its sockets close, as those of a killed process do
    began = time.monotonic()
    assert [each.next_membership(1).ids for each in (b, c, d)] == [["w1", "w2", "w3"]] * 3
    assert time.monotonic() - began < SILENCE_S / 2
    b.stop()
    c.stop()
    wait_for_members([d], ["w3"])


def test_a_process_whose_door_closes_last_is_dead_for_all_at_once(world: World) -> None:
    """Whoever finds the door open looks again; before, the first of two waited for silence."""
    a, b = world.make("w0"), world.make("w1")
    door = socket.create_server(("127.0.0.1", 0))
    dying = Member("w2", "127.0.0.1", door.getsockname()[1])
    membership = Membership(1, (a.me, b.me, dying), "run")
    for each in (a, b):
        each.start(membership)
    places = [(each.me.host, each.me.port) for each in (a, b)]
    channels = [answer_door(socket.create_connection(place), dying, KEY) for place in places]
    wait_until(lambda: len(a._channels) == len(b._channels) == 2)
    began = time.monotonic()
    for channel in channels:
        channel.socket.close()
    wait_until(lambda: "w2" in a._reconnector or "w2" in b._reconnector)
    time.sleep(0.1)
    door.close()
    assert [each.next_membership(1).ids for each in (a, b)] == [["w0", "w1"]] * 2
    assert time.monotonic() - began < SILENCE_S / 2


def test_a_death_that_one_is_sure_of_is_told_to_the_others(world: World) -> None:
    a, b, c = world.start(3)
    with a.changed:
        a._notice_death("w9")
    wait_until(lambda: all("w9" in each.roster.knowledge.dead for each in (b, c)))


def test_who_leaves_is_not_missed(world: World) -> None:
    a, b, c = world.start(3)
    b.leave()
    wait_for_members([a, c], ["w0", "w2"])


def test_whoever_knows_the_key_may_join(world: World) -> None:
    members = world.start(3)
    new = world.make("new")
    new.join([("127.0.0.1", 1), ("127.0.0.1", members[1].me.port)])
    assert new.next_membership(0).ids == ["w0", "w1", "w2", "new"]
    wait_for_members([*members, new], ["w0", "w1", "w2", "new"])
    members[0].stop()
    wait_for_members([*members[1:], new], ["w1", "w2", "new"])


def test_who_joins_does_not_wait_for_one_that_has_died_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, new = world.start(3), world.make("new")
    hear = Joining.hear_members

    def hear_of_a_dead_one(joining: Joining, told: object) -> None:
        found = Membership.from_json(told)
        dead = [Member("dead", "127.0.0.1", 1)] if found.generation == 1 else []
        hear(joining, replace(found, members=(*found.members, *dead)).to_json())

    monkeypatch.setattr(Joining, "hear_members", hear_of_a_dead_one)
    new.join([("127.0.0.1", members[1].me.port)])
    wait_until(lambda: len(new._channels) == 3 and new._joining is not None and len(new._joining.world) == 4)
    members[0].stop()
    wait_for_members([*members[1:], new], ["w1", "w2", "new"])


def test_who_joins_hears_an_answer_that_comes_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host the thread that joins may have its answer before its starter goes on; before, the answer
    was lost, and the joiner was never let in."""
    members, new = world.start(2), world.make("new")
    start = threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "thinwire-join":
            time.sleep(0.3)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    new.join([("127.0.0.1", members[1].me.port)])
    wait_for_members([*members, new], ["w0", "w1", "new"])


def test_who_joins_tries_again_where_a_handshake_came_to_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shake, failures = PeerConnections._shake_or_close, iter(range(12))

    def fail_at_first(peers: PeerConnections, connection: socket.socket, member: Member) -> None:
        if peers.me.id == "new" and member.id == "w2" and next(failures, None) is not None:
            connection.close()
        else:
            shake(peers, connection, member)

    monkeypatch.setattr(PeerConnections, "_shake_or_close", fail_at_first)
    members, new = world.start(3), world.make("new")
    new.join([("127.0.0.1", members[0].me.port)])
    wait_for_members([*members, new], ["w0", "w1", "w2", "new"])


def test_who_joins_a_run_that_is_over_is_told_so(world: World) -> None:
    (last,), new = world.start(1), world.make("new", silence_s=1.0)
    last.stop()
    new.join([("127.0.0.1", last.me.port)])
    with pytest.raises(PeerLost, match=f"nobody .* has answered for 3 s at 127.0.0.1:{last.me.port}"):
        new.next_membership(0)


def test_a_broken_connection_between_the_living_is_made_anew(world: World) -> None:
    a, b = world.start(2)
    broken = a._channels["w1"]
    broken.socket.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: a._channels.get("w1") not in (None, broken))
    a.publish(1, "key", b"value")
    assert b.published(1, ["key"], SOON_S) == [b"value"]
    assert a.roster.membership is not None
    assert a.roster.membership.generation == 1


def test_a_worker_that_was_left_out_comes_back(world: World) -> None:
    a, b, c = world.start(3)
    with c.changed:  # it stands still, as a frozen process does
        world_without = wait_for_members([a, b], ["w0", "w1"])
    back = c.next_membership(1)
    assert back.generation > world_without.generation
    assert back.ids[:2] == ["w0", "w1"]
    assert back.ids[2].startswith("w2+")
    wait_until(lambda: a.roster.membership == b.roster.membership == back)


def test_a_store_for_backends(world: World) -> None:
    stores = [PeerStore(each, 1, "run") for each in world.start(3)]
    values: list[Any] = []

    def use(rank: int) -> None:
        prefixed = PrefixStore("lane", stores[rank])
        prefixed.set(f"{rank}", f"value {rank}")
        values.append([prefixed.get(f"{other}") for other in range(3)])

    threads = [threading.Thread(target=use, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert values == [[b"value 0", b"value 1", b"value 2"]] * 3
    world.peers[1].stop()
    with pytest.raises(RuntimeError, match="generation 1 ended"):
        stores[0].get("never")


def test_a_world_that_went_on_by_itself_does_not_publish_in_this_one(world: World) -> None:
    """Both may be at the same generation, and hear each other again."""
    a, b = world.start(2)
    for each, lineage in ((a, "one"), (b, "other")):
        each.start(Membership(2, (each.me,), lineage))
    ours, theirs = PeerStore(a, 2, "one"), PeerStore(b, 2, "other")
    theirs.set("control/0", "theirs")
    b.publish(2, "seen", b"1")
    assert a.published(2, ["seen"], SOON_S)
    ours.set("control/0", "ours")
    theirs.set("control/1", "theirs")
    b.publish(2, "seen too", b"1")
    assert a.published(2, ["seen too"], SOON_S)
    assert ours.get("control/0") == b"ours"
    with pytest.raises(RuntimeError, match=r"control/1 was not published within 0\.1 s"):
        ours.wait(["control/1"], timedelta(seconds=0.1))


def test_strangers_stay_out_and_disturb_nobody(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a, b = world.start(2)
    generator = random.Random(0)
    caplog.set_level(logging.WARNING)
    door = socket.create_connection(("127.0.0.1", a.me.port))
    with pytest.raises(Stranger):
        answer_door(door, Member("w1", "127.0.0.1", 5), b"another key")
    for number in range(300):
        with socket.create_connection(("127.0.0.1", a.me.port)) as scanner:
            if number % 3:
                scanner.sendall(generator.randbytes(generator.randrange(200)) + b"\n")
    forged = Member("w1", "127.0.0.1", 5).to_json()
    with socket.create_connection(("127.0.0.1", a.me.port)) as scanner:
        scanner.sendall(json.dumps(["hello", forged, "0" * 32, "0" * 32]).encode() + b"\n")
        scanner.sendall(b"x" * 100_000)
    time.sleep(2 * 0.5)
    assert set(a._channels) == {"w1"}
    a.publish(1, "key", b"value")
    assert b.published(1, ["key"], SOON_S) == [b"value"]
    assert a.roster.membership is not None
    assert a.roster.membership.generation == 1
    told = [record for record in caplog.records if "refused a connection" in record.message]
    assert len(told) == 1, "one address, one line"


@pytest.mark.parametrize("at_door", [True, False])
def test_text_that_cannot_be_encoded_makes_a_stranger(at_door: bool) -> None:
    """JSON may hold half a character; before, its error ended the thread that knocked or joined."""
    me, (mine, theirs) = Member("w0", "127.0.0.1", 5), socket.socketpair()
    proof = ["hello", me.to_json(), "0", "\ud800"] if at_door else ["welcome", me.to_json(), "\ud800"]
    with theirs:
        for message in ([] if at_door else [["thinwire", "0", 1]]) + [proof]:
            theirs.sendall(json.dumps(message).encode() + b"\n")
        with pytest.raises(Stranger):
            open_door(mine, me, KEY, 1) if at_door else answer_door(mine, me, KEY)
    assert mine.fileno() == -1


def test_a_guest_who_has_gone_before_the_door_opens_holds_nobody_up(world: World) -> None:
    (a,) = world.start(1)
    called = threading.Event()

    def accept() -> None:
        a._channels._accept()  # select has said that somebody is there
        called.set()

    threading.Thread(target=accept, daemon=True).start()
    held_up = not called.wait(2)
    socket.create_connection(("127.0.0.1", a.me.port)).close()  # so that the thread ends in any case
    assert not held_up


def test_a_port_scanner_is_told_of_once_and_members_who_look_are_not(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    a, _ = world.start(2)
    for source in ["127.0.0.1"] * 3 + ["127.0.0.9"] * 3:
        socket.create_connection(("127.0.0.1", a.me.port), source_address=(source, 0)).close()

    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if "refused a connection" in each.getMessage()]

    wait_until(lambda: bool(told()) and not a._acceptor)
    assert len(told()) == 1
    assert "127.0.0.9" in told()[0]


def test_nonsense_from_a_holder_of_the_key_stops_nobody(world: World) -> None:
    """10,000 messages with fields of any kind: what makes no sense is dropped."""
    a, b = world.start(2)
    generator, guest = random.Random(0), Member("guest", "127.0.0.1", 5)
    channel = answer_door(socket.create_connection(("127.0.0.1", a.me.port)), guest, KEY)
    channel.socket.setblocking(True)
    kinds = ["roster", "set", "members", "probe", "heard", "relay", "relayed", "beat", "accept", "\u0000"]
    votes = ["prepare", "accept", "promise", "accepted", "refused", "decided", "behind", "at"]
    for _ in range(10_000):
        vote = ["run", generator.choice([0, 1, 2, 1 << 70]), generator.choice(votes)]
        fields = [random_value(generator) for _ in range(generator.randrange(4))]
        body = [*vote, *fields] if generator.random() < 0.5 else fields
        assert channel.send([generator.choice(kinds), *generator.choice([fields, [body], ["w1", body]])])
    a.publish(1, "key", b"value")
    assert b.published(1, ["key"], SOON_S) == [b"value"]
    wait_until(lambda: a._detector.heard_within("guest", SOON_S, time.monotonic()))
    channel.socket.close()
    wait_until(lambda: "guest" not in a._channels)
    assert a._thread.is_alive()
    assert b._thread.is_alive()


def test_a_recorded_handshake_does_not_open_the_door(world: World) -> None:
    a, _ = world.start(2)
    recorded: list[bytes] = []
    proxy = socket.create_server(("127.0.0.1", 0))

    def record() -> None:
        client, _ = proxy.accept()
        with client, socket.create_connection(("127.0.0.1", a.me.port)) as door:
            client.sendall(door.recv(4096))
            recorded.append(client.recv(4096))
            door.sendall(recorded[0])
            client.sendall(door.recv(4096))

    thread = threading.Thread(target=record)
    thread.start()
    me = Member("guest", "127.0.0.1", 5)
    answer_door(socket.create_connection(proxy.getsockname()), me, KEY).socket.close()
    thread.join()
    proxy.close()
    wait_until(lambda: "guest" not in a._channels)
    with socket.create_connection(("127.0.0.1", a.me.port)) as replay:
        replay.recv(4096)
        replay.sendall(recorded[0])
        replay.settimeout(SOON_S)
        assert replay.recv(4096) == b"", "closed without a welcome"
    assert "guest" not in a._channels


def test_a_message_that_was_changed_on_its_way_ends_the_connection(world: World) -> None:
    a, b = world.start(2)
    channel = a._channels["w1"]
    with a.changed:
        channel.socket.send(b'00000000000000000000000000000000 ["left"]\n')
    wait_until(lambda: a._channels.get("w1") not in (None, channel))
    assert "w0" not in b.roster.knowledge.dead
