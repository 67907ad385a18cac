"""How workers agree on the next membership: single-decree Paxos, in which the members of the last one vote.

One proposer asks all it can hear of for a promise, and proposes those who answer, with whoever wants to join;
when a quorum has accepted, that is decided. Whoever waits too long becomes a proposer too. A promise hands
over what was accepted before, so two proposers never have two different memberships decided.

Nothing here waits or sends: `outbox` holds what is to be sent, and the caller says what time it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.elastic.membership import Member, Membership, is_quorum, largest_connected
from thinwire.errors import DataError

Message = list[Any]
Ballot = tuple[int, int]
"""A round, and the proposer's place in the last membership; the higher one wins."""
NO_BALLOT: Ballot = (0, -1)
VOTING = ("prepare", "accept")
"""What a proposer asks the members of the last membership, and nobody else."""


@dataclass(slots=True)
class Knowledge:
    """What one worker knows of the others, from its own connections."""

    dead: set[str] = field(default_factory=set)
    """Their processes have ended: they never come back under this id."""
    silent: set[str] = field(default_factory=set)
    """Not heard of for too long, by nobody: frozen, or cut off."""
    unreachable: set[str] = field(default_factory=set)
    """Not heard of for too long, but others hear them: only the path from here is broken."""
    joining: dict[str, Member] = field(default_factory=dict)

    @property
    def missed(self) -> dict[str, set[str]]:
        """Whom this worker does not hear, by how."""
        return {"dead": self.dead, "silent": self.silent, "unreachable": self.unreachable}


@dataclass(slots=True)
class _Proposal:
    ballot: Ballot
    promises: dict[str, tuple[Ballot, list[Any] | None]] = field(default_factory=dict)
    unreachable: dict[str, Sequence[str]] = field(default_factory=dict)
    members: list[Any] | None = None
    """What is proposed, once enough have promised."""
    accepted_by: set[str] = field(default_factory=set)


class MembershipVote:
    """One worker's part in finding the membership that follows `base`."""

    def __init__(self, base: Membership, me: str, knowledge: Knowledge, retry_s: float) -> None:
        self.base, self.me = base, me
        self.outbox: list[tuple[str, Message]] = []
        self.decided: Membership | None = None
        self.started = False
        """Whether somebody has asked for a promise."""
        self._knowledge = knowledge
        self._retry_s = retry_s
        self._ids = base.ids
        self._place = self._ids.index(me)
        self._promised: Ballot = NO_BALLOT
        self._accepted: tuple[Ballot, list[Any] | None] = (NO_BALLOT, None)
        self._proposal: _Proposal | None = None
        self._act_at_s = 0.0
        """When to propose or to ask again, should nothing have been decided."""
        self._to_self: list[Message] = []

    @property
    def reachable(self) -> list[str]:
        """Members of the last membership that may still answer, this worker included."""
        gone = self._knowledge.dead | self._knowledge.silent
        return [each for each in self._ids if each == self.me or each not in gone]

    @property
    def has_quorum(self) -> bool:
        return is_quorum(self.reachable, self._ids, self._knowledge.dead)

    def tick(self, now_s: float) -> None:
        """Go on: propose if it is this worker's turn, and ask those again who have not answered."""
        if self.decided is not None:
            return
        if self._proposal is not None:
            if now_s >= self._act_at_s:
                self._ask_again(now_s)
            self._advance()
        elif self.reachable[0] == self.me or (self.started and now_s >= self._act_at_s):
            self._propose(now_s)
        elif not self.started:
            self.started = True
            self._wait_for_others(now_s)
        self._hear_self(now_s)

    def receive(self, sender: str, message: Message, now_s: float) -> None:
        if sender in self._ids and self.decided is None:  # who joins, or was left out, has no vote
            self._receive(sender, message, now_s)
            self._hear_self(now_s)

    def _hear_self(self, now_s: float) -> None:
        """A proposer votes too."""
        while self._to_self:
            self._receive(self.me, self._to_self.pop(0), now_s)

    def _receive(self, sender: str, message: Message, now_s: float) -> None:
        match message:
            case ["prepare", int(round_), int(place)]:
                self._answer_prepare(sender, (round_, place), now_s)
            case ["accept", int(round_), int(place), [*members]] if self._is_valid(members):
                self._answer_accept(sender, (round_, place), members, now_s)
            case ["promise", int(round_), int(place), [int(r), int(p)], list() | None as members, [*missed]]:
                proposal = self._own((round_, place))
                if proposal is not None and (members is None or self._is_valid(members)):
                    proposal.promises[sender] = (r, p), members
                    proposal.unreachable[sender] = [str(each) for each in missed]
                    self._advance()
            case ["accepted", int(round_), int(place)]:
                proposal = self._own((round_, place))
                if proposal is not None:
                    proposal.accepted_by.add(sender)
                    self._advance()
            case ["refused", int(round_), int(place)] if self._proposal is not None:
                if (round_, place) > self._proposal.ballot:
                    self._proposal = None  # another one proposes: give it time
                    self._promised = max(self._promised, (round_, place))
                    self._wait_for_others(now_s)

    def _is_valid(self, members: list[Any]) -> bool:
        try:
            Membership.from_json([self.base.generation + 1, members, self.base.lineage])
        except DataError:
            return False
        return True

    # -- voting -------------------------------------------------------------------------------------

    def _answer_prepare(self, sender: str, ballot: Ballot, now_s: float) -> None:
        self.started = True
        if ballot < self._promised:
            self._send(sender, ["refused", *self._promised])
            return
        self._follow(ballot, now_s)
        accepted, members = self._accepted
        missed = sorted(self._knowledge.silent | self._knowledge.unreachable)
        self._send(sender, ["promise", *ballot, list(accepted), members, missed])

    def _answer_accept(self, sender: str, ballot: Ballot, members: list[Any], now_s: float) -> None:
        self.started = True
        if ballot < self._promised:
            self._send(sender, ["refused", *self._promised])
            return
        self._follow(ballot, now_s)
        self._accepted = ballot, members
        self._send(sender, ["accepted", *ballot])

    def _follow(self, ballot: Ballot, now_s: float) -> None:
        self._promised = ballot
        if ballot[1] != self._place:
            self._proposal = None
            self._wait_for_others(now_s)

    def _wait_for_others(self, now_s: float) -> None:
        """Propose only if nothing is decided for a while: the later a worker's place, the longer."""
        self._act_at_s = now_s + self._retry_s * (2 + self._place)

    # -- proposing ----------------------------------------------------------------------------------

    def _propose(self, now_s: float) -> None:
        self.started = True
        self._proposal = _Proposal((self._promised[0] + 1, self._place))
        self._ask_again(now_s)

    def _ask_again(self, now_s: float) -> None:
        proposal = self._proposal
        assert proposal is not None
        self._act_at_s = now_s + self._retry_s
        if proposal.members is None:
            question: Message = ["prepare", *proposal.ballot]
            missing = [each for each in self.reachable if each not in proposal.promises]
        else:
            question = ["accept", *proposal.ballot, proposal.members]
            missing = [each for each in self.reachable if each not in proposal.accepted_by]
        for each in missing:
            self._send(each, question)

    def _own(self, ballot: Ballot) -> _Proposal | None:
        found = self._proposal
        return found if found is not None and found.ballot == ballot else None

    def _advance(self) -> None:
        """Go on with the proposal once all who can be heard of have answered, and they are a quorum."""
        proposal = self._proposal
        if proposal is None:
            return
        if proposal.members is None:
            if self._all_in(proposal.promises):
                proposal.members = self._choose(proposal)
                for each in self.reachable:
                    self._send(each, ["accept", *proposal.ballot, proposal.members])
        elif self._all_in(proposal.accepted_by):
            members = tuple(map(Member.from_json, proposal.members))
            self.decided = Membership(self.base.generation + 1, members, self.base.lineage)

    def _all_in(self, answered: Sequence[str] | set[str] | dict[str, Any]) -> bool:
        return set(self.reachable) <= set(answered) and is_quorum(answered, self._ids, self._knowledge.dead)

    def _choose(self, proposal: _Proposal) -> list[Any]:
        """What may have been decided already, if anything; else whoever has answered, and who joins."""
        _, accepted = max(proposal.promises.values(), key=lambda each: each[0])
        if accepted is not None:
            return accepted
        gone = self._knowledge.dead | self._knowledge.silent
        there = [each for each in self._ids if each in proposal.promises and each not in gone]
        stay = set(largest_connected(there, proposal.unreachable))
        chosen = [member for member in self.base.members if member.id in stay]
        joining = [each for id_, each in self._knowledge.joining.items() if id_ not in gone]
        return [member.to_json() for member in (*chosen, *joining)]

    def _send(self, to: str, message: Message) -> None:
        if to == self.me:
            self._to_self.append(message)
        else:
            self.outbox.append((to, message))
