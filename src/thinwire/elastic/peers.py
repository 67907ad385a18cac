"""The control sockets of an elastic world: from each worker to every other, with a door that stays open.

One thread beats, hears who is there, feeds the roster and sends what it wants sent. Closed connections are
known at once; a worker that falls silent is asked for through the others first. Whoever holds the run's key
may join.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from thinwire.elastic.acceptor import Acceptor
from thinwire.elastic.board import Board
from thinwire.elastic.channels import Channels
from thinwire.elastic.failure_detector import FailureDetector
from thinwire.elastic.handshake import HELLO_S, KeyedChannel, Stranger, answer_door
from thinwire.elastic.joining import RETRY_S, Joining
from thinwire.elastic.journal import Journal
from thinwire.elastic.membership import Member, Membership
from thinwire.elastic.reconnector import Reconnector
from thinwire.elastic.roster import Roster
from thinwire.errors import PeerLost
from thinwire.wire.control import Message
from thinwire.wire.patience import BEAT_S, Patience

_log = logging.getLogger("thinwire")
_TICK_S = 0.05
"""While the membership changes."""


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
        self.on_change: Callable[[Membership], None] = lambda membership: None
        """Called from the thread here when a membership is adopted."""
        self.patience = Patience(silence_s)
        self._key = key
        self.changed = threading.Condition(threading.RLock())
        """Held for everything below; notified whenever something has changed."""
        self.roster = Roster(me, None, retry_s=RETRY_S)
        self._acceptor = Acceptor(key, lambda: self.roster, self._add)
        self._channels = Channels(
            door,
            arrived=self._acceptor.greet,
            heard=self._hear,
            ended=lambda channel: self._reconnector.start(channel.peer),
        )
        self._detector, self._board = FailureDetector(self.patience), Board()
        self._reconnector = Reconnector(
            self.changed,
            is_settled=lambda member: (
                self._stopped or member.id in self._channels or member.id in self.roster.knowledge.dead
            ),
            refused=self._notice_refusal,
            opened=self._shake_or_close,
            ended=self._channels.poke,
        )
        self._joining: Joining | None = None
        self._met: set[str] = set()
        """Whoever has had a connection here."""
        self._adopted: Membership | None = None
        self._news: list[Membership] = []
        """Adopted, and not told to who listens."""
        self._stopped = False
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
        me = self.me

        def connect(address: tuple[str, int]) -> None:
            connection = socket.create_connection(address, timeout=HELLO_S)
            self._add(answer_door(connection, me, self._key))

        with self.changed:  # whoever answers first is heard once there is somebody who joins
            self._joining = Joining(
                addresses,
                self.changed,
                wanted=lambda: not self._stopped and self.me is me and self.roster.membership is None,
                connected=lambda: list(self._channels),
                connect=connect,
                reach=self._reconnector.start,
                ask=lambda: self._channels.send_all(["join"]),
            )

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
                elif current is None:
                    if self._joining is not None:
                        self._joining.check_answers(self.patience.alone_s)
                elif current.generation > after:
                    return current
                else:
                    if not self.roster.changing:
                        self.roster.want_change()
                        self._channels.poke()
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
                self._channels.send_all(["left"])
        self.stop()

    def stop(self) -> None:
        with self.changed:
            if self._stopped:
                return
            self._stopped = True
            self._channels.poke()
            self.changed.notify_all()
        self._thread.join()
        with self.changed:  # somebody who knocks may just find a connection broken
            self._channels.close()

    # -- values that members publish ------------------------------------------------------------------

    def publish(self, generation: int, key: str, value: bytes) -> None:
        """Let all members of a generation have a value."""
        with self.changed:
            message = self._board.publish(generation, key, value)
            self._channels.send_all(message)
            self.changed.notify_all()

    def published(self, generation: int, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        """The values of these keys, once they are there; None if the membership changes before."""
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while (found := self._board.read(generation, keys)) is None:
                current = self.roster.membership
                changes = current is None or current.generation != generation or self.roster.changing
                if changes or self._stopped or time.monotonic() > deadline:
                    return None
                self.changed.wait(min(_TICK_S, max(0.0, deadline - time.monotonic())))
            return found

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        beat_at_s = 0.0
        while True:
            with self.changed:
                wait_s = _TICK_S if self.roster.changing or self._reconnector else BEAT_S / 2
            ready = self._channels.wait(wait_s)
            with self.changed:
                if self._stopped:
                    return
                for handle in ready:
                    handle()
                now_s = time.monotonic()
                if now_s >= beat_at_s:
                    beat_at_s = now_s + BEAT_S
                    self._channels.send_all(["roster", self.roster.beat] if self.roster.beat else ["beat"])
                    for id_ in self._detector.judge(self.roster, now_s):
                        self._channels.send_all(["probe", id_])
                    self._connect_missing()
                self._detector.forget_joiners(self.roster, now_s)
                if self._journal.is_open and (found := self.roster.membership) is not None:
                    # before a change that follows at once
                    self._journal.note_missed(self.roster.knowledge.missed, found.ids)
                self.roster.tick(now_s)
                self._flush()
                self._notice_adoption()
                news, self._news = self._news, []
            for each in news:  # without the lock: whoever listens may take others
                self.on_change(each)

    def _hear(self, peer: Member, message: Message) -> None:
        now_s = time.monotonic()
        self._detector.note(peer.id, now_s)
        self.roster.notice_life(peer.id)
        match message:
            case ["roster", [*body]]:
                self.roster.receive(peer.id, body, now_s)
            case ["set", int(generation), str(key), str(value)]:
                if self._board.receive(generation, key, value, self.roster.membership):
                    self.changed.notify_all()
            case ["left"]:
                self.roster.notice_death(peer.id)
            case ["dead", str(id_)] if id_ != self.me.id and id_ not in self._channels:
                self.roster.notice_death(id_)
            case ["join"]:
                self._detector.note_joiner(peer.id, now_s)
                self.roster.notice_joiner(peer)
            case ["members", told] if self._joining is not None and self.roster.membership is None:
                self._joining.hear_members(told)
            case ["probe", str(id_)]:
                if id_ in self._channels and self._detector.heard_within(id_, 2 * BEAT_S, now_s):
                    self._channels.send(peer.id, ["heard", id_])
            case ["heard", str(id_)]:
                self._detector.note_vouching(id_, peer.id, now_s)
            case ["relay", str(to), [*body]]:
                self._channels.send(to, ["relayed", peer.id, body])
            case ["relayed", str(sender), [*body]]:
                self.roster.receive(sender, body, now_s)

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
        self._detector.expect(found.ids, time.monotonic(), connected=self._channels)
        self._met &= {*found.ids, *self._channels}
        self._board.forget_before(found.generation)
        self._connect_missing()
        for id_ in set(self._channels) - set(found.ids):  # who joins waits for those that it was told of
            self._channels.send(id_, ["members", found.to_json()])
        self._news.append(found)
        self._channels.poke()
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
                self._reconnector.start(member)

    def _flush(self) -> None:
        """Send what the roster wants sent, to those out of reach by way of whoever hears them."""
        outgoing, self.roster.outbox = self.roster.outbox, []
        for to, message in outgoing:
            unreachable = to in self.roster.knowledge.unreachable
            if unreachable and (relay := self._detector.relay_to(to, time.monotonic())):
                self._channels.send(relay, ["relay", to, message])
            else:
                self._channels.send(to, ["roster", message])
        self._channels.flush()

    # -- connections ----------------------------------------------------------------------------------

    def _add(self, channel: KeyedChannel) -> None:
        with self.changed:
            if self._stopped:
                channel.socket.close()
                return
            id_ = channel.peer.id
            self._channels.add(channel)
            self._met.add(id_)
            self._detector.note(id_, time.monotonic())
            membership = self.roster.membership
            if membership is not None and id_ not in membership.ids:
                self._channels.send(id_, ["members", membership.to_json()])
            for message in self._board.own:
                self._channels.send(id_, message)
            self._channels.poke()
            self.changed.notify_all()

    def _notice_refusal(self, member: Member) -> None:
        with self.changed:
            # not if it was silent before: the others may have gone on with it since
            if self._detector.heard_within(member.id, self.patience.ask_s, time.monotonic()):
                self._notice_death(member.id)

    def _notice_death(self, id_: str) -> None:
        """What is certain is told to all, who may have seen less of it."""
        if id_ not in self.roster.knowledge.dead:
            self.roster.notice_death(id_)
            self._channels.send_all(["dead", id_])

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
        self._channels.clear()
        self._board.clear()
        self._adopted = None
        self.join([(member.host, member.port) for member in world.members])
