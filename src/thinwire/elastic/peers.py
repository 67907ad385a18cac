"""The control sockets of an elastic world: from each worker to every other, with a door that stays open.

One thread beats, hears who is there, feeds the roster and sends what it wants sent. Closed connections are
known at once; a worker that falls silent is asked for through the others first. Whoever holds the run's key
may join.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from thinwire.elastic.handshake import HELLO_S, KeyedChannel, Silence, Stranger, answer_door, open_door
from thinwire.elastic.journal import Journal
from thinwire.elastic.membership import Member, Membership
from thinwire.elastic.roster import Roster
from thinwire.errors import DataError, PeerLost
from thinwire.wire.control import Message
from thinwire.wire.patience import BEAT_S, Patience

_log = logging.getLogger("thinwire")
RETRY_S = 0.5
_TICK_S = 0.05
"""While the membership changes."""
_KNOCK_S = 1.0
"""To see whether a worker whose connection broke still listens."""
_KNOCK_AGAIN_S = (0.02, 0.05, 0.1, 0.2)
"""A process that ends may close its door after its connections: whoever finds it open looks again."""
_MOST_GUESTS = 32
"""Handshakes under way at one time."""
_JOIN_S = 3.0
"""Who has asked to join is forgotten unless it asks again."""


class PeerConnections:
    """One worker's connections to the others, and who is in."""

    def __init__(
        self,
        door: socket.socket,
        me: Member,
        key: bytes,
        *,
        silence_s: float,
        journal: Journal | None = None,
    ) -> None:
        self.me = me
        self._journal = journal or Journal()
        self._noted: dict[str, set[str]] = {}
        self.on_change: Callable[[Membership], None] = lambda membership: None
        """Called from the thread here when a membership is adopted."""
        self.patience = Patience(silence_s)
        self._door, self._key = door, key
        self.changed = threading.Condition(threading.RLock())
        """Held for everything below; notified whenever something has changed."""
        self.roster = Roster(me, None, retry_s=RETRY_S)
        self._channels: dict[str, KeyedChannel] = {}
        self._heard_s: dict[str, float] = {}
        self._vouched: dict[str, tuple[float, str]] = {}
        """When somebody has last said that it hears a worker, and who."""
        self._asked_s: dict[str, float] = {}
        """When somebody has asked to join."""
        self._knocking: set[str] = set()
        self._met: set[str] = set()
        """Whoever has had a connection here."""
        self._values: dict[tuple[int, str], str] = {}
        """What members have published, by generation and key."""
        self._published: list[Message] = []
        self._strangers: set[str] = set()
        self._guests = 0
        self._adopted: Membership | None = None
        self._news: list[Membership] = []
        """Adopted, and not told to who listens."""
        self._stopped = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ)
        self._wake, woken = socket.socketpair()
        for end in (self._wake, woken):
            end.setblocking(False)
        self._woken = woken
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="thinwire-peers", daemon=True)
        self._thread.start()

    # -- for the training thread ----------------------------------------------------------------------

    def start(self, membership: Membership) -> None:
        """Be a member of the first membership."""
        with self.changed:
            self.roster = Roster(self.me, membership, retry_s=RETRY_S)
            self._notice_adoption()

    def join(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Ask to be taken in, by way of whoever answers; see `next_membership` for when it is."""
        threading.Thread(target=self._ask_to_join, args=(list(addresses),), daemon=True).start()

    def next_membership(self, after: int, *, allow_minority: bool = False) -> Membership:
        """Wait for the membership that follows generation `after`, and see to it that there will be one.

        PeerLost if this worker is cut off from the majority for good.
        """
        lonely_since = None
        with self.changed:
            while True:
                current, now_s = self.roster.membership, time.monotonic()
                if self._stopped:
                    raise PeerLost("this worker has left the world")
                if self.roster.left_out is not None:
                    self._start_anew(self.roster.left_out)
                    after = 0
                elif current is not None and current.generation > after:
                    return current
                elif current is not None:
                    if not self.roster.changing:
                        self.roster.want_change()
                        self._poke()
                    lonely_since = None if self.roster.has_quorum else (lonely_since or now_s)
                    if lonely_since is not None and now_s > lonely_since + self.patience.alone_s:
                        self._end_alone(allow_minority=allow_minority)
                self.changed.wait(_TICK_S)

    def _end_alone(self, *, allow_minority: bool) -> None:
        membership, reachable = self.roster.membership, self.roster.reachable
        assert membership is not None
        lost = [member.id for member in membership.members if member.id not in reachable]
        if not allow_minority:
            raise PeerLost(
                f"this worker reaches only {len(reachable)} of {len(membership.members)} workers "
                f"(not {', '.join(lost)}), which is no majority: it stops, since the others may go on",
                hint="start it again when the network is back, and it joins the others; "
                "Elastic(allow_minority=True) goes on, and may leave two models",
            )
        self.roster.fork()
        _log.warning(
            "this worker goes on with %d of %d workers without a majority: the others may go on too, the two "
            "worlds never merge, and the one with more workers (of equals the one with %s) is the run",
            len(reachable),
            len(membership.members),
            membership.members[0].id,
        )
        self._notice_adoption()

    def leave(self) -> None:
        """Say good-bye: the others go on without this worker at once."""
        with self.changed:
            if not self._stopped:
                self._send_all(["left"])
        self.stop()

    def stop(self) -> None:
        with self.changed:
            if self._stopped:
                return
            self._stopped = True
            self._poke()
            self.changed.notify_all()
        self._thread.join()
        for channel in self._channels.values():
            channel.socket.close()
        for each in (self._door, self._wake, self._woken, self._selector):
            each.close()

    # -- values that members publish ------------------------------------------------------------------

    def publish(self, generation: int, key: str, value: bytes) -> None:
        """Let all members of a generation have a value."""
        with self.changed:
            message: Message = ["set", generation, key, value.hex()]
            self._published.append(message)
            self._values[generation, key] = message[3]
            self._send_all(message)
            self.changed.notify_all()

    def published(self, generation: int, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        """The values of these keys, once they are there; None if the membership changes before."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while not all((generation, key) in self._values for key in keys):
                current = self.roster.membership
                changes = current is None or current.generation != generation or self.roster.changing
                if changes or self._stopped or time.monotonic() > deadline:
                    return None
                self.changed.wait(min(_TICK_S, max(0.0, deadline - time.monotonic())))
            return [bytes.fromhex(self._values[generation, key]) for key in keys]

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        beat_at_s = 0.0
        while True:
            with self.changed:
                wait_s = _TICK_S if self.roster.changing or self._knocking else BEAT_S / 2
            ready = self._selector.select(wait_s)
            with self.changed:
                if self._stopped:
                    return
                for key, _ in ready:
                    self._handle(key)
                now_s = time.monotonic()
                if now_s >= beat_at_s:
                    beat_at_s = now_s + BEAT_S
                    self._send_all(["roster", self.roster.beat] if self.roster.beat else ["beat"])
                    self._judge(now_s)
                    self._connect_missing()
                self._forget_joiners(now_s)
                self.roster.tick(now_s)
                self._note_changes()
                self._flush()
                self._notice_adoption()
                news, self._news = self._news, []
            for each in news:  # without the lock: whoever listens may take others
                self.on_change(each)

    def _note_changes(self) -> None:
        """Write down whom this worker has begun to miss since it last looked."""
        if not self._journal.is_open:
            return
        known = self.roster.knowledge
        members = set(() if self.roster.membership is None else self.roster.membership.ids)
        sets = {"dead": known.dead, "silent": known.silent, "unreachable": known.unreachable}
        for how, ids in sets.items():
            for id_ in (ids & members) - self._noted.get(how, set()):
                self._journal.note("missed", id=id_, how=how)
            self._noted[how] = ids & members

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._door:
            with contextlib.suppress(OSError):
                connection, address = self._door.accept()
                self._greet(connection, str(address[0]))
        elif key.fileobj is self._woken:
            with contextlib.suppress(OSError):
                self._woken.recv(64)
        else:
            channel: KeyedChannel = key.data
            messages, stands = channel.receive()
            for message in messages:
                self._hear(channel.peer, message)
            if not stands:
                self._drop(channel)

    def _hear(self, peer: Member, message: Message) -> None:
        now_s = time.monotonic()
        self._heard_s[peer.id] = now_s
        self.roster.notice_life(peer.id)
        match message:
            case ["roster", [*body]]:
                self.roster.receive(peer.id, body, now_s)
            case ["set", int(generation), str(key), str(value)] if self._is_wanted(generation, key, value):
                self._values[generation, key] = value
                self.changed.notify_all()
            case ["left"]:
                self.roster.notice_death(peer.id)
            case ["dead", str(id_)] if id_ != self.me.id and id_ not in self._channels:
                self.roster.notice_death(id_)
            case ["join"]:
                self._asked_s[peer.id] = now_s
                self.roster.notice_joiner(peer)
            case ["members", membership]:
                self._connect_all(membership)
            case ["probe", str(id_)]:
                if now_s - self._heard_s.get(id_, 0.0) < 2 * BEAT_S and id_ in self._channels:
                    self._send(peer.id, ["heard", id_])
            case ["heard", str(id_)]:
                self._vouched[id_] = now_s, peer.id
            case ["relay", str(to), [*body]]:
                self._send(to, ["relayed", peer.id, body])
            case ["relayed", str(sender), [*body]]:
                self.roster.receive(sender, body, now_s)

    def _is_wanted(self, generation: int, key: str, value: str) -> bool:
        current = self.roster.membership
        sane = len(key) <= 256 and len(self._values) < 1 << 16 and _is_hex(value)
        return sane and (current is None or current.generation <= generation <= current.generation + 64)

    def _judge(self, now_s: float) -> None:
        """Tell the roster of members that were not heard of for too long; before, ask others for them."""
        membership = self.roster.membership
        for id_ in [] if membership is None else membership.ids:
            quiet_s = now_s - self._heard_s.setdefault(id_, now_s)
            if id_ == self.me.id or id_ in self.roster.knowledge.dead or quiet_s < self.patience.ask_s:
                continue
            self._send_all(["probe", id_])
            if quiet_s > self.patience.silence_s:
                vouched_s, _ = self._vouched.get(id_, (0.0, ""))
                self.roster.notice_silence(id_, others_hear=now_s - vouched_s < 3 * BEAT_S)

    def _forget_joiners(self, now_s: float) -> None:
        for id_ in list(self.roster.knowledge.joining):
            if now_s > self._asked_s.get(id_, 0.0) + _JOIN_S:
                del self.roster.knowledge.joining[id_]

    def _notice_adoption(self) -> None:
        """After anything that may have moved the roster on: connect to who is new, and tell who listens."""
        found = self.roster.membership
        if found is None or found is self._adopted or self.roster.left_out is not None:
            if self.roster.left_out is not None:
                self.changed.notify_all()
            return
        self._adopted = found
        self._journal.note(
            "adopted", generation=found.generation, lineage=found.lineage, ids=found.ids, me=self.me.id
        )
        now_s = time.monotonic()
        for id_ in found.ids:
            self._heard_s[id_] = max(now_s, self._heard_s.get(id_, 0.0))
        self._published = [each for each in self._published if each[1] >= found.generation]
        self._values = {key: value for key, value in self._values.items() if key[0] >= found.generation}
        self._connect_missing()
        for id_ in set(self._channels) - set(found.ids):  # who joins waits for those that it was told of
            self._send(id_, ["members", found.to_json()])
        self._news.append(found)
        self._poke()
        self.changed.notify_all()

    def _connect_missing(self) -> None:
        """To all earlier members: of two, the later one makes the connection. At the later ones only look
        whether they live, if there was a connection before."""
        membership = self.roster.membership
        if membership is None or self.me.id not in membership.ids:
            return
        place = membership.ids.index(self.me.id)
        for number, member in enumerate(membership.members):
            wanted = number < place or (number > place and member.id in self._met)
            if wanted and member.id not in self._channels:
                self._start_knocking(member)

    # -- sending --------------------------------------------------------------------------------------

    def _flush(self) -> None:
        outgoing, self.roster.outbox = self.roster.outbox, []
        for to, message in outgoing:
            relay_at_s, relay = self._vouched.get(to, (0.0, ""))
            if (
                to in self.roster.knowledge.unreachable
                and time.monotonic() - relay_at_s < self.patience.silence_s
            ):
                self._send(relay, ["relay", to, message])
            else:
                self._send(to, ["roster", message])
        for channel in list(self._channels.values()):
            if channel.unsent and not channel.flush():
                self._drop(channel)

    def _send(self, to: str, message: Message) -> None:
        channel = self._channels.get(to)
        if channel is not None and not channel.send(message):
            self._drop(channel)

    def _send_all(self, message: Message) -> None:
        for id_ in list(self._channels):
            self._send(id_, message)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    # -- connections ----------------------------------------------------------------------------------

    def _greet(self, connection: socket.socket, address: str) -> None:
        """Shake hands with whoever has come to the door, in a thread of its own."""
        if self._guests >= _MOST_GUESTS:
            connection.close()
            return
        self._guests += 1
        membership = self.roster.membership
        generation = 0 if membership is None else membership.generation

        def shake() -> None:
            try:
                channel = open_door(connection, self.me, self._key, generation)
            except (Stranger, OSError) as error:
                self._note_stranger(address, error)
            else:
                self._add(channel)
            finally:
                self._guests -= 1

        threading.Thread(target=shake, name="thinwire-guest", daemon=True).start()

    def _note_stranger(self, address: str, error: Exception) -> None:
        membership = self.roster.membership
        hosts = {self.me.host} if membership is None else {member.host for member in membership.members}
        if isinstance(error, Silence) and address in hosts:
            return  # a member that looks whether this one still listens
        if address not in self._strangers:
            self._strangers.add(address)
            _log.warning("refused a connection from %s: %s; told once per address", address, error)

    def _add(self, channel: KeyedChannel) -> None:
        with self.changed:
            if self._stopped:
                channel.socket.close()
                return
            id_ = channel.peer.id
            if (old := self._channels.pop(id_, None)) is not None:
                self._selector.unregister(old.socket)
                old.socket.close()
            self._channels[id_] = channel
            self._met.add(id_)
            self._heard_s[id_] = time.monotonic()
            self._selector.register(channel.socket, selectors.EVENT_READ, channel)
            membership = self.roster.membership
            if membership is not None and id_ not in membership.ids:
                self._send(id_, ["members", membership.to_json()])
            for message in self._published:
                self._send(id_, message)
            self._poke()
            self.changed.notify_all()

    def _drop(self, channel: KeyedChannel) -> None:
        """A connection has ended: see whether the worker has."""
        if self._channels.get(channel.peer.id) is not channel:
            return
        del self._channels[channel.peer.id]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(channel.socket)
        channel.socket.close()
        self._start_knocking(channel.peer)

    def _start_knocking(self, member: Member) -> None:
        if member.id not in self._knocking and member.id not in self.roster.knowledge.dead:
            self._knocking.add(member.id)
            threading.Thread(target=self._knock, args=(member,), name="thinwire-knock", daemon=True).start()

    def _knock(self, member: Member) -> None:
        """Until there is a connection, or the member is known to be dead or out of reach; of two who lost
        their connection, the later member makes the new one."""
        for pause_s in (*_KNOCK_AGAIN_S, 0.0):
            if not self._listens(member):
                break
            with self.changed:
                done = self._stopped or member.id in self._channels or member.id in self.roster.knowledge.dead
            if done:
                break
            time.sleep(pause_s)
        with self.changed:
            self._knocking.discard(member.id)
            self._poke()

    def _listens(self, member: Member) -> bool:
        """Knock once; a door that refuses belongs to a process that has ended."""
        try:
            connection = socket.create_connection((member.host, member.port), timeout=_KNOCK_S)
        except ConnectionRefusedError:
            with self.changed:
                # not if it was silent before: the others may have gone on with it since
                if time.monotonic() - self._heard_s.get(member.id, 0.0) < self.patience.ask_s:
                    self._notice_death(member.id)
            return False
        except OSError:
            return False  # it cannot be reached: silence will tell
        self._shake_or_close(connection, member)
        return True

    def _notice_death(self, id_: str) -> None:
        """What is certain is told to all, who may have seen less of it."""
        if id_ not in self.roster.knowledge.dead:
            self.roster.notice_death(id_)
            self._send_all(["dead", id_])

    def _shake_or_close(self, connection: socket.socket, member: Member) -> None:
        with self.changed:
            membership = self.roster.membership
            ids = [] if membership is None else membership.ids
            mine = self.me.id not in ids or (
                member.id in ids and ids.index(member.id) < ids.index(self.me.id)
            )
        try:
            if not mine:
                raise Stranger("the other one connects")
            channel = answer_door(connection, self.me, self._key)
            if channel.peer.id != member.id:
                with self.changed:
                    self._notice_death(member.id)  # another process has its door now
                raise Stranger("another process listens there")
        except (Stranger, OSError):
            connection.close()
        else:
            self._add(channel)

    # -- joining --------------------------------------------------------------------------------------

    def _start_anew(self, world: Membership) -> None:
        """This worker was left out, frozen or cut off: it comes back as a new member."""
        _log.warning(
            "the others went on without this worker as generation %d: it joins them", world.generation
        )
        self.me = replace(self.me, id=f"{self.me.id.split('+')[0]}+{secrets.token_hex(2)}")
        self.roster = Roster(self.me, None, retry_s=RETRY_S)
        for channel in list(self._channels.values()):
            del self._channels[channel.peer.id]
            self._selector.unregister(channel.socket)
            channel.socket.close()
        self._adopted, self._values, self._published = None, {}, []
        self.join([(member.host, member.port) for member in world.members])

    def _ask_to_join(self, addresses: list[tuple[str, int]]) -> None:
        """Connect to whoever answers, and to all it names; ask all of them when all are connected."""
        me = self.me
        while not self._stopped and self.me is me and self.roster.membership is None:
            for address in addresses:
                with self.changed:
                    if self._channels:
                        break
                with contextlib.suppress(OSError, Stranger):
                    connection = socket.create_connection(address, timeout=HELLO_S)
                    self._add(answer_door(connection, me, self._key))
            with self.changed:
                wanted = self._world
                if wanted is not None and all(member.id in self._channels for member in wanted):
                    self._send_all(["join"])
            time.sleep(RETRY_S)

    _world: tuple[Member, ...] | None = None
    """Members of the world that this worker wants to join."""

    def _connect_all(self, membership: object) -> None:
        if self.roster.membership is not None:
            return
        with contextlib.suppress(DataError):
            self._world = Membership.from_json(membership).members
            for member in self._world:
                if member.id not in self._channels:
                    self._start_knocking(member)


def _is_hex(value: str) -> bool:
    try:
        bytes.fromhex(value)
    except ValueError:
        return False
    return True
