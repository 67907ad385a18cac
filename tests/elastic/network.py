"""A virtual network for rosters: messages take time, workers crash and freeze, links break and heal."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from itertools import count

from thinwire.elastic.membership import Member, Membership
from thinwire.elastic.roster import Roster

BEAT_S, SILENCE_S, RETRY_S = 0.5, 4.0, 0.4


class Node:
    """One process: a roster, and when it last heard of whom."""

    def __init__(self, me: Member, membership: Membership | None, now_s: float) -> None:
        self.roster = Roster(me, membership, retry_s=RETRY_S)
        self.heard_s: dict[str, float] = {}
        self.born_s = now_s
        self.crashed = False
        self.frozen_until_s = 0.0
        self.stops_knocking = False
        """As a joiner does that cannot reach every member."""


class Network:
    """Steps rosters on a virtual clock, and remembers every membership that any of them has adopted."""

    def __init__(self, num_workers: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.cut: set[frozenset[str]] = set()
        self.adopted: dict[tuple[str, int], set[Membership]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        members = tuple(Member(f"w{i}", "10.0.0.1", 1 + i) for i in range(num_workers))
        first = Membership(1, members, "run")
        self.nodes = {member.id: Node(member, first, 0.0) for member in members}
        for id_ in self.nodes:
            self._every(id_)

    # -- faults ---------------------------------------------------------------------------------------

    def crash(self, id_: str) -> None:
        """Its process ends. Its host tells everyone who is connected, as far as it can be reached."""
        self.nodes[id_].crashed = True
        for other in self.nodes:
            self._later(0.01, lambda other=other: self._see_closed(other, id_))  # type: ignore[misc]

    def freeze(self, id_: str, seconds: float) -> None:
        self.nodes[id_].frozen_until_s = self.now_s + seconds

    def partition(self, sides: Iterable[Iterable[str]]) -> None:
        side = {id_: number for number, ids in enumerate(sides) for id_ in ids}
        everyone = list(self.nodes)
        self.cut = {
            frozenset((a, b))
            for a in everyone
            for b in everyone
            if a < b and side.get(a, 0) != side.get(b, 0)
        }

    def heal(self) -> None:
        """Connections whose other end has died meanwhile break now."""
        self.cut = set()
        for id_, node in self.nodes.items():
            if node.crashed:
                self.crash(id_)

    def join(self, id_: str, through: str) -> None:
        me = Member(id_, "10.0.0.1", 1000)
        self.nodes[id_] = Node(me, None, self.now_s)
        self._every(id_)
        self._knock(id_, through)

    # -- running --------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._events)
            call()
        self.now_s = until_s

    def living(self) -> list[str]:
        return [id_ for id_, node in self.nodes.items() if not node.crashed]

    def membership(self, id_: str) -> Membership | None:
        roster = self.nodes[id_].roster
        return None if roster.left_out is not None else roster.membership

    def check_agreement(self) -> None:
        """No generation has two memberships."""
        for (lineage, generation), found in self.adopted.items():
            assert len(found) == 1, f"{lineage} {generation}: {found}"

    # -- inside ---------------------------------------------------------------------------------------

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), call))

    def _reaches(self, a: str, b: str) -> bool:
        return frozenset((a, b)) not in self.cut

    def _awake(self, id_: str) -> bool:
        node = self.nodes[id_]
        return not node.crashed and node.frozen_until_s <= self.now_s

    def _every(self, id_: str) -> None:
        """Beat, judge who is silent, and go on, again and again."""
        node = self.nodes[id_]
        if node.crashed:
            return
        if self._awake(id_):
            beat = node.roster.beat
            for other in self.nodes:
                if other != id_:
                    self._deliver(id_, other, lambda other=other: self._hear(other, id_, beat))  # type: ignore[misc]
            membership = self.membership(id_)
            if membership is not None:
                for other in membership.ids:
                    if self.now_s - node.heard_s.setdefault(other, self.now_s) > SILENCE_S and other != id_:
                        node.roster.notice_silence(other)
            node.roster.tick(self.now_s)
            self._flush(id_)
        self._later(BEAT_S * self.random.uniform(0.8, 1.2), lambda: self._every(id_))

    def _deliver(self, sender: str, to: str, call: Callable[[], None]) -> None:
        """A frozen process gets its messages when it goes on."""

        def arrive() -> None:
            node = self.nodes[to]
            if node.crashed or not self._reaches(sender, to):
                return
            if node.frozen_until_s > self.now_s:
                self._later(node.frozen_until_s - self.now_s + self.random.uniform(0, 0.01), arrive)
                return
            call()
            node.roster.tick(self.now_s)
            self._flush(to)

        self._later(self.random.uniform(0.0005, 0.05), arrive)

    def _hear(self, me: str, other: str, beat: list[object] | None) -> None:
        self.nodes[me].heard_s[other] = self.now_s
        self.nodes[me].roster.notice_life(other)
        if beat is not None:
            self.nodes[me].roster.receive(other, beat, self.now_s)

    def _see_closed(self, me: str, other: str) -> None:
        """Counts as a death only if it was heard of a moment ago, as in `Peers`."""
        node = self.nodes[me]
        if node.crashed or not self._reaches(me, other):
            return
        if self.now_s - node.heard_s.get(other, 0.0) < SILENCE_S / 2:
            node.roster.notice_death(other)
        else:
            node.roster.notice_silence(other)
        node.roster.tick(self.now_s)
        self._flush(me)

    def _flush(self, id_: str) -> None:
        roster = self.nodes[id_].roster
        for membership in (roster.membership, roster.left_out):
            if membership is not None:
                key = membership.lineage, membership.generation
                self.adopted.setdefault(key, set()).add(membership)
        outgoing, roster.outbox = roster.outbox, []
        for to, message in outgoing:
            if to in self.nodes:

                def call(to: str = to, message: list[object] = message) -> None:
                    self.nodes[to].roster.receive(id_, message, self.now_s)

                self._deliver(id_, to, call)

    def _knock(self, id_: str, through: str) -> None:
        """A joiner asks one member, which tells the others, until it is in."""
        node = self.nodes[id_]
        if node.crashed or node.stops_knocking or self.membership(id_) is not None:
            return
        me = self.nodes[id_].roster.me
        for other in (through, *(self.membership(through) or Membership(1, (), "")).ids):
            self._deliver(id_, other, lambda other=other: self.nodes[other].roster.notice_joiner(me))  # type: ignore[misc]
        self._later(RETRY_S, lambda: self._knock(id_, through))
