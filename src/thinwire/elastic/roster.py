"""One membership after another, as one worker knows them: the state machine that the control sockets feed.

Whoever is behind is told what was decided; whoever finds itself left out may join again as a new member.
"""

from __future__ import annotations

import hashlib
import json

from thinwire.elastic.agreement import VOTING, Knowledge, MembershipVote, Message
from thinwire.elastic.membership import Member, Membership
from thinwire.errors import DataError

_KEPT = 64
"""Memberships that a worker remembers, for those who are behind."""


class Roster:
    """Who is in, from this worker's point of view."""

    def __init__(self, me: Member, membership: Membership | None, *, retry_s: float) -> None:
        """Without a `membership` this worker waits to be taken in."""
        self.me, self.membership = me, membership
        self.outbox: list[tuple[str, Message]] = []
        """What is to be sent, to whom."""
        self.left_out: Membership | None = None
        """The membership that was decided without this worker."""
        self.other_lineages: set[str] = set()
        """Lineages of worlds that went on by themselves, as far as they were heard of."""
        self.knowledge = Knowledge()
        self._retry_s = retry_s
        self._history: dict[int, Membership] = {}
        self._wanted = False
        self._agreement: MembershipVote | None = None
        if membership is not None:
            self._adopt(membership)

    # -- what this worker notices ---------------------------------------------------------------------

    def notice_death(self, id_: str) -> None:
        """The process of a worker has ended, or it said good-bye."""
        self.knowledge.dead.add(id_)
        self.knowledge.joining.pop(id_, None)

    def notice_silence(self, id_: str, *, others_hear: bool = False) -> None:
        """A worker was not heard of for too long; `others_hear`: somebody else does hear it."""
        known = self.knowledge
        (known.unreachable if others_hear else known.silent).add(id_)
        (known.silent if others_hear else known.unreachable).discard(id_)

    def notice_life(self, id_: str) -> None:
        self.knowledge.silent.discard(id_)
        self.knowledge.unreachable.discard(id_)

    def notice_joiner(self, member: Member) -> None:
        """A worker asks to be taken in; one that is in already has missed that."""
        if self.membership is None:
            return
        if member.id in self.membership.ids:
            self._tell_decisions(member.id, self.membership.generation - 1)
        else:
            self.knowledge.joining[member.id] = member

    def want_change(self) -> None:
        """Ask for the next generation, though everybody may be there: connections for data have broken."""
        self._wanted = True

    @property
    def changing(self) -> bool:
        """Whether the membership is not what it should be, or somebody has asked to change it."""
        if self.membership is None:
            return False
        gone = self.knowledge.dead | self.knowledge.silent | self.knowledge.unreachable
        started = self._agreement is not None and self._agreement.started
        return (
            started
            or self._wanted
            or bool(self.knowledge.joining)
            or not gone.isdisjoint(self.membership.ids)
        )

    @property
    def has_quorum(self) -> bool:
        """Whether enough workers can be heard of for the next change."""
        return self._agreement is not None and self._agreement.has_quorum

    @property
    def reachable(self) -> list[str]:
        return [] if self._agreement is None else self._agreement.reachable

    # -- going on -------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        if self._agreement is not None and self.changing:
            self._agreement.tick(now_s)
            self._collect()

    def receive(self, sender: str, message: Message, now_s: float) -> None:
        """Messages have the form [lineage, generation, kind, ...]; what makes no sense is dropped."""
        match message:
            case [str(lineage), int(generation), *body] if body:
                self._receive(sender, lineage, generation, body, now_s)

    def _receive(self, sender: str, lineage: str, generation: int, body: Message, now_s: float) -> None:
        if body[0] == "decided":
            self._hear_decision(body)
        elif self.membership is None:
            if body[0] in VOTING:  # only members are asked: this worker is one, and has missed that
                self.outbox.append((sender, [lineage, generation - 1, "behind"]))
        elif lineage != self.membership.lineage:
            self.other_lineages.add(lineage[:64])
        elif body[0] == "behind" or generation < self.membership.generation:
            self._tell_decisions(sender, generation)
        elif body[0] == "at" and generation == self.membership.generation:
            return
        elif generation > self.membership.generation:
            self._send(sender, ["behind"])
        elif self._agreement is not None:
            self._agreement.receive(sender, body, now_s)
            self._collect()

    @property
    def beat(self) -> Message | None:
        """What a worker says of itself again and again: whoever hears that it is behind tells it what was
        decided, however long it has had nothing else to say."""
        if self.membership is None or self.left_out is not None:
            return None
        return [self.membership.lineage, self.membership.generation, "at"]

    def fork(self) -> None:
        """Go on with those who can be reached, as a world of its own that never merges with the other.

        All of them come to the same name for it without a word: it follows from who they are.
        """
        assert self.membership is not None
        base, reachable = self.membership, self.reachable
        members = tuple(member for member in base.members if member.id in reachable)
        name = json.dumps([base.lineage, base.generation, reachable])
        lineage = hashlib.sha256(name.encode()).hexdigest()[:8]
        self._adopt(Membership(base.generation + 1, members, lineage))

    def _tell_decisions(self, to: str, after: int) -> None:
        """What was decided since, in order, so that who is behind comes to the same place."""
        assert self.membership is not None
        known = [each for generation, each in sorted(self._history.items()) if generation > after]
        for each in known:
            self.outbox.append((to, [each.lineage, each.generation, "decided", each.to_json()]))

    def _hear_decision(self, body: Message) -> None:
        try:
            found = Membership.from_json(body[1])
        except (DataError, IndexError):
            return
        if self.membership is None:
            if self.me.id in found.ids:
                self._adopt(found)
        elif found.lineage == self.membership.lineage and found.generation > self.membership.generation:
            # one that skips generations comes from somebody who has forgotten those in between
            self._adopt(found)

    def _collect(self) -> None:
        agreement = self._agreement
        assert agreement is not None
        for to, message in agreement.outbox:
            self._send(to, message)
        agreement.outbox.clear()
        if agreement.decided is not None:
            self._spread(agreement.decided)
            self._adopt(agreement.decided)

    def _spread(self, decided: Membership) -> None:
        assert self.membership is not None
        everyone = dict.fromkeys([*self.membership.ids, *decided.ids])
        for each in everyone:
            if each != self.me.id and each not in self.knowledge.dead:
                message = [decided.lineage, decided.generation, "decided", decided.to_json()]
                self.outbox.append((each, message))

    def _adopt(self, membership: Membership) -> None:
        self._history[membership.generation] = membership
        self._history.pop(membership.generation - _KEPT, None)
        self.knowledge.dead &= set[str]().union(*(each.ids for each in self._history.values()))
        self._wanted = False
        for each in membership.ids:
            self.knowledge.joining.pop(each, None)
        if self.me.id in membership.ids:
            self.membership = membership
            self._agreement = MembershipVote(membership, self.me.id, self.knowledge, self._retry_s)
        else:
            self.left_out, self._agreement = membership, None

    def _send(self, to: str, message: Message) -> None:
        assert self.membership is not None
        self.outbox.append((to, [self.membership.lineage, self.membership.generation, *message]))
