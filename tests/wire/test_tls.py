"""TLS connections in one process, over real sockets: matching, endings, strangers, files."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from tests.wire.tls import SOON_S, backends, contexts, in_threads, make_certificate, meshes
from thinwire.errors import DataError, PeerDiffers, PeerLate
from thinwire.wire.tls import backend, connection, files, meeting
from thinwire.wire.tls.backend import TlsSource
from thinwire.wire.tls.connection import DATA, DATA_UNOFFERED, OFFER, Frame, Outgoing, Sender
from thinwire.wire.tls.files import TLS, Contexts, load
from thinwire.wire.tls.meeting import Door, meet
from thinwire.wire.tls.mesh import TlsMesh

__all__ = ["contexts"]  # a fixture
LARGE = 3_000_000


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline, "not so after a while"
        time.sleep(0.005)


def at_rest(mesh: TlsMesh) -> bool:
    """Nothing is kept of what has passed."""
    kept = mesh._grants, mesh._waiting, mesh._receives, mesh._claims, mesh._offers, mesh._from_anyone
    return not any(kept)


def test_messages_are_matched_whoever_comes_first(contexts: Contexts) -> None:
    """Random sends and receives, some from whoever comes: those of one peer and tag arrive in their order."""
    generator = random.Random(3)
    plan = [(s, t, generator.randrange(3)) for _ in range(400) for s, t in [generator.sample(range(3), 2)]]
    anyone = {(to, 2) for to in range(3)}  # with tag 2 from anybody
    with meshes(3, contexts) as made:

        def work(rank: int) -> None:
            chance = random.Random(rank)
            sends = [(to, tag, n) for n, (source, to, tag) in enumerate(plan) if source == rank]
            receives = [(source, tag, n) for n, (source, to, tag) in enumerate(plan) if to == rank]
            works, came = [], []
            while sends or receives:
                time.sleep(chance.choice([0.0, 0.0, 0.002]))
                if sends and (not receives or chance.random() < 0.5):
                    to, tag, n = sends.pop(0)
                    works.append(made[rank].send(torch.full((4,), n), to, 7, tag))
                else:
                    source, tag, n = receives.pop(0)
                    inbox = torch.zeros(4, dtype=torch.int64)
                    chosen = None if (rank, tag) in anyone else source
                    came.append((source, tag, n, inbox))
                    works.append(made[rank].receive(inbox, chosen, 7, tag))
            for each in works:
                assert each.wait(SOON_S)
            for source, tag, n, inbox in came:
                assert tag == 2 or inbox.tolist() == [n] * 4, (source, tag)
            arrived = [int(inbox[0]) for _, tag, _, inbox in came if tag == 2]
            assert sorted(arrived) == [n for _, to, tag, n in _numbered(plan) if (to, tag) == (rank, 2)]
            for other in range(3):
                theirs = [n for n in arrived if plan[n][0] == other]
                assert all(a < b for a, b in pairwise(theirs))

        in_threads(work, 3)
        wait_until(lambda: all(at_rest(mesh) for mesh in made))


def _numbered(plan: list[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    return [(source, to, tag, n) for n, (source, to, tag) in enumerate(plan)]


def test_an_offer_that_overtakes_an_earlier_message_stays_open(contexts: Contexts) -> None:
    """It takes the claim of that message; what is received next answers it, and nothing is left over."""
    with meshes(2, contexts) as (_, b):
        first, second = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        works = [b.receive(first, 0, 7, 5)]  # grants number 0
        b.heard(0, Frame(OFFER, 5, 7))
        for number in (0, 1):
            frame = Frame(DATA if number else DATA_UNOFFERED, 5, 7, number, 1)
            place = b.heard(0, frame)
            assert place is not None
            place[:] = bytes([number + 1])
            b.landed(0, frame)
            if not number:
                works.append(b.receive(second, 0, 7, 5))
        assert all(work.done() for work in works)
        assert (int(first), int(second)) == (1, 2)
        assert at_rest(b)


def test_nothing_is_sent_before_it_is_known_to_be_read(contexts: Contexts) -> None:
    with meshes(2, contexts) as (a, b):
        sent = a.send(torch.arange(LARGE), 1, 1, 5)
        wait_until(lambda: b._offers)
        other_lane = a.send(torch.ones(3), 1, 2, 5)
        came = torch.zeros(3)
        b.receive(came, 0, 2, 5).wait(SOON_S)  # goes past the one that nobody takes
        assert other_lane.wait(SOON_S)
        assert came.tolist() == [1, 1, 1]
        assert not sent.done()
        inbox = torch.zeros(LARGE, dtype=torch.int64)
        assert b.receive(inbox, 0, 1, 5).wait(SOON_S)
        assert sent.wait(SOON_S)
        assert torch.equal(inbox, torch.arange(LARGE))


def test_what_was_sent_arrives_after_its_sender_has_ended(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receiver sees the end of its own connection to the sender before it has read the data."""
    with meshes(2, contexts) as (a, b):
        reads, heard = threading.Event(), b.heard

        def hear_later(peer: int, frame: Frame) -> memoryview | None:
            if frame.kind in (DATA, DATA_UNOFFERED):
                assert reads.wait(SOON_S)
            return heard(peer, frame)

        monkeypatch.setattr(b, "heard", hear_later)
        inbox = torch.zeros(1000)
        receive = b.receive(inbox, 0, 1, 5)
        a.send(torch.ones(1000), 1, 1, 5).wait(SOON_S)
        closing = threading.Thread(target=a.close)
        closing.start()
        for receiver in a._receivers:
            receiver.abort()
        b._senders[0].tell(Frame(connection.OFFER, 9, 9))
        b._senders[0].tell(Frame(connection.OFFER, 9, 9))
        b._unreachable(0, "the connection to it broke")
        assert not receive.done()
        assert closing.is_alive(), "it waits until its good-bye is read"
        reads.set()
        assert receive.wait(SOON_S)
        assert inbox.sum() == 1000
        closing.join(SOON_S)
        assert not closing.is_alive()


def test_large_messages_both_ways_pass_small_buffers(contexts: Contexts) -> None:
    """Sockets that hold a fraction of a message: whoever sends all of its own first would block for good."""
    with meshes(3, contexts) as made:
        for mesh in made:
            ends = [each._connection for each in mesh._senders.values()]
            for end in (*ends, *(each._connection for each in mesh._receivers)):
                for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    end.setsockopt(socket.SOL_SOCKET, buffer, 64 << 10)
        lanes = [backends(made, lane) for lane in (1, 2)]

        def work(rank: int) -> None:
            data = [torch.full((3 * 500_000,), float(rank + number)) for number in range(2)]
            outs = [torch.empty_like(each) for each in data]
            calls = [
                lane[rank].alltoall_base(out, each, [], [], None)
                for lane, each, out in zip(lanes, data, outs, strict=True)
            ]
            in_threads(lambda number: calls[number].wait(), 2)
            for number, out in enumerate(outs):
                parts = out.view(3, -1)
                assert [part.unique().tolist() for part in parts] == [[float(r + number)] for r in range(3)]

        in_threads(work, 3)


def test_keys_are_renewed(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REKEY_BYTES", 1 << 20)
    with meshes(2, contexts) as (a, b):
        first = a._senders[1]._connection
        for number in range(6):
            data, inbox = torch.randn(200_000), torch.zeros(200_000)
            receive = b.receive(inbox, 0, 1, number)
            a.send(data, 1, 1, number).wait(SOON_S)
            receive.wait(SOON_S)
            assert torch.equal(data, inbox)
        wait_until(lambda: a._senders[1]._connection is not first)


def test_a_message_of_another_size_is_an_error(contexts: Contexts) -> None:
    with meshes(2, contexts) as (a, b):
        b.receive(torch.zeros(3), 0, 1, 5)
        with pytest.raises(RuntimeError, match="sends 8 bytes where the other expects 12"):
            a.send(torch.zeros(2), 1, 1, 5).wait(SOON_S)


def test_who_ends_fails_what_others_wait_for(contexts: Contexts) -> None:
    with meshes(3, contexts) as (a, b, c):
        waits = [b.receive(torch.zeros(3), 0, 1, 5), b.send(torch.zeros(3), 0, 1, 6)]
        others = b.receive(torch.zeros(3), 2, 1, 5)
        a.close()
        for each in waits:
            with pytest.raises(RuntimeError, match="worker has ended"):
                each.wait(SOON_S)
        with pytest.raises(RuntimeError, match="nothing can be sent"):
            b.send(torch.zeros(3), 0, 1, 5).wait(SOON_S)
        c.send(torch.ones(3), 1, 1, 5).wait(SOON_S)
        assert others.wait(SOON_S)
        anyone = b.receive(torch.zeros(3), None, 1, 7)
        b.abort()
        with pytest.raises(RuntimeError, match="given up"):
            anyone.wait(SOON_S)


def test_what_is_sent_just_as_a_connection_ends_fails(contexts: Contexts) -> None:
    """It had been granted before: between that and the sending thread, the connection ends."""
    with meshes(2, contexts) as (a, b):
        b.receive(torch.zeros(3), 0, 1, 5)
        wait_until(lambda: a._grants)
        sender = a._senders[1]
        a._senders[1] = Late(sender, lambda: a._unreachable(1, "it broke"))  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="it broke"):
            a.send(torch.ones(3), 1, 1, 5).wait(SOON_S / 10)
        a._senders[1] = sender


class Late:
    """A sender at whose door something else comes first."""

    def __init__(self, sender: Sender, first: Callable[[], None]) -> None:
        self.sender, self.first = sender, first
        self.drop, self.abort, self.join = sender.drop, sender.abort, sender.join

    def send(self, message: Outgoing) -> bool:
        self.first()
        return self.sender.send(message)


def test_a_peer_that_breaks_the_rules_is_cut_off(contexts: Contexts) -> None:
    generator = random.Random(1)
    for kind in (DATA, 77):
        with meshes(2, contexts) as (a, b):
            receive = b.receive(torch.zeros(3), 0, 1, 5)
            a._senders[1].tell(Frame(kind, 5, 1, generator.randrange(10), 1 << 60))
            with pytest.raises(RuntimeError, match=r"has ended: (\d{19} bytes|a frame of the unknown kind)"):
                receive.wait(SOON_S)


def test_nothing_is_left(contexts: Contexts) -> None:
    with meshes(2, contexts):
        pass  # what the first use leaves counts for none
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with meshes(3, contexts) as made:
        in_threads(lambda rank: made[rank].close(), 3)
    wait_until(lambda: threading.active_count() == threads)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_connections_that_are_made_after_all_are_closed(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of workers while they connect: one of them has given up, and the others do not know yet."""
    with meshes(2, contexts):
        pass  # what the first use leaves counts for none
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    store, given_up = HashStore(), threading.Event()
    source = TlsSource(store, 0, [0, 1], contexts, SOON_S)

    def meet_slowly(*args: Any) -> TlsMesh:
        mesh = meet(*args)
        assert given_up.wait(SOON_S)
        return mesh

    def work(rank: int) -> None:
        if rank == 0:
            with pytest.raises(RuntimeError, match="given up"):
                source.take([0, 1], "lane", SOON_S)
            return
        mesh = meet(PrefixStore("thinwire", store), 1, 2, contexts, SOON_S)
        receive = mesh.receive(torch.zeros(3), 0, 1, 5)
        source.abort()
        given_up.set()
        with pytest.raises(RuntimeError, match="from the worker has ended"):
            receive.wait(SOON_S / 10)
        mesh.abort()
        mesh.join()

    monkeypatch.setattr(backend, "meet", meet_slowly)
    in_threads(work, 2)
    wait_until(lambda: threading.active_count() == threads)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(RuntimeError, match="given up"):
        source.take([0, 1], "another lane", SOON_S)


# -- who comes to the door ---------------------------------------------------------------------------


def test_who_connects_waits_until_it_is_let_in(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    lets_in, worker_of = threading.Event(), Door._worker_of
    came: list[int] = []

    def think(self: Door, line: bytes) -> int:
        came.append(1)
        assert lets_in.wait(SOON_S)
        return worker_of(self, line)

    monkeypatch.setattr(Door, "_worker_of", think)
    ended: list[TlsMesh] = []
    store = HashStore()
    threads = [
        threading.Thread(target=lambda rank=rank: ended.append(meet(store, rank, 2, contexts, SOON_S)))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(came) == 2)  # both handshakes of TLS have ended
    assert not ended
    lets_in.set()
    for thread in threads:
        thread.join(SOON_S)
    assert len(ended) == 2
    in_threads(lambda rank: ended[rank].close(), 2)


def test_who_is_turned_away_for_a_moment_comes_again(
    contexts: Contexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a door where too many have come at once."""
    turned_away, worker_of = set[bytes](), Door._worker_of

    def turn_away(self: Door, line: bytes) -> int:
        if line not in turned_away:
            turned_away.add(line)
            raise ConnectionError("too many")
        return worker_of(self, line)

    monkeypatch.setattr(Door, "_worker_of", turn_away)
    monkeypatch.setattr(meeting, "_told", set[str]())
    with meshes(3, contexts):
        assert len(turned_away) == 6


def test_strangers_do_not_get_in(
    contexts: Contexts,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise, a port scanner, another certificate, none, and the right one with another meeting's token."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(meeting, "_told", set[str]())
    other, store = load(make_certificate(tmp_path)), HashStore()
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.check_hostname, nameless.verify_mode = False, ssl.CERT_NONE
    generator = random.Random(0)
    first: list[TlsMesh] = []
    waiting = threading.Thread(target=lambda: first.append(meet(store, 0, 2, contexts, SOON_S)))
    waiting.start()
    host, port, _ = json.loads(store.get("tls/0"))
    for number in range(60):
        with socket.create_connection((host, port), source_address=("127.0.0.2", 0)) as stranger:
            if number % 4 == 0:
                stranger.sendall(generator.randbytes(generator.randrange(1, 400)))
    for context in (other.client, nameless, contexts.client):
        stranger = socket.create_connection((host, port), source_address=("127.0.0.3", 0))
        with stranger:
            assert not _is_let_in(context, stranger)
    second = meet(store, 1, 2, contexts, SOON_S)
    waiting.join(SOON_S)
    inbox = torch.zeros(3)
    receive = first[0].receive(inbox, 1, 1, 5)
    second.send(torch.ones(3), 0, 1, 5).wait(SOON_S)
    assert receive.wait(SOON_S)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))  # the door is closed
    in_threads(lambda rank: [first[0], second][rank].close(), 2)
    told = [record.getMessage() for record in caplog.records if "refused a TLS" in record.getMessage()]
    assert sorted("127.0.0.2" in each for each in told) == [False, True], told


def _is_let_in(context: ssl.SSLContext, stranger: socket.socket) -> bool:
    try:
        with context.wrap_socket(stranger) as secured:
            secured.sendall(b'["thinwire", "0", 1]\n')
            return bool(secured.recv(1))
    except OSError:
        return False


def test_who_is_late_or_unreachable_is_named(contexts: Contexts) -> None:
    with pytest.raises(PeerLate, match="worker 1 has not opened a door") as caught:
        meet(HashStore(), 0, 2, contexts, 0.05)
    assert caught.value.rank == 1
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store.set("tls/1", f'["127.0.0.1", {silent.getsockname()[1]}, ""]')
        with pytest.raises(PeerLate, match=r"worker 1 at 127.0.0.1 cannot be reached by TLS|waited 0.3 s"):
            meet(store, 0, 2, contexts, 0.3)


def test_two_certificates_do_not_meet(contexts: Contexts, tmp_path: Path) -> None:
    both, store = [contexts, load(make_certificate(tmp_path))], HashStore()
    with pytest.raises(PeerDiffers, match="do not accept each other's certificate"):
        # not for long: the other one may have left before it was asked for its certificate
        in_threads(lambda rank: meet(store, rank, 2, both[rank], 5.0), 2)


# -- the file -----------------------------------------------------------------------------------------


def test_where_the_certificate_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="neither TLS"):
        TLS().path()
    monkeypatch.setenv("THINWIRE_KEY_FILE", "/keys/run.key")
    assert TLS().path() == Path("/keys/run.pem")
    assert TLS().path("own.key") == Path("own.pem")
    monkeypatch.setenv("THINWIRE_TLS_FILE", "/other.pem")
    assert TLS().path("own.key") == Path("/other.pem")
    assert TLS(file="mine.pem").path() == Path("mine.pem")


def test_what_is_no_certificate_is_named(tmp_path: Path) -> None:
    good = make_certificate(tmp_path).read_text()
    key, worker, _ = good.split("-----BEGIN CERTIFICATE-----")
    path = tmp_path / "bad.pem"
    for text, told in [
        ("", "holds no private key with its certificate"),
        ("abc" * 100, "holds no private key"),
        (good.replace(key, ""), "holds no private key"),
        (key + "-----BEGIN CERTIFICATE-----" + worker, "no certificate of an authority"),
    ]:
        path.write_text(text)
        with pytest.raises(DataError, match=told) as caught:
            load(path)
        assert "thinwire keys new --tls" in caught.value.hint
    with pytest.raises(DataError, match=r"none\.pem does not exist"):
        load(tmp_path / "none.pem")


def test_dates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now_s = make_certificate(tmp_path), time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 3 * 86400)
    with pytest.raises(DataError, match="has expired on 20"):
        load(path)
    monkeypatch.setattr(time, "time", lambda: now_s - 3600)
    with pytest.raises(DataError, match="the clock of this host says") as caught:
        load(path)
    assert "set the clock" in caught.value.hint


def test_a_certificate_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_certificate(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(DataError, match="exists"):
        files.make(path, days=1)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="the command openssl") as caught:
        files.make(tmp_path / "new.pem", days=1)
    assert "install the package openssl" in caught.value.hint


def test_greetings_are_bounded(contexts: Contexts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing do not keep others out for longer than a moment."""
    monkeypatch.setattr(meeting, "_HELLO_S", 0.2)
    monkeypatch.setattr(meeting, "_MOST_GUESTS", 4)
    door = Door("127.0.0.1", frozenset([1]), contexts)
    try:
        silent = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(12)]
        for each in silent:
            each.settimeout(SOON_S)
            assert each.recv(1) == b"", "closed"
            each.close()
        wait_until(lambda: door._guests == 0)
    finally:
        door.close()
