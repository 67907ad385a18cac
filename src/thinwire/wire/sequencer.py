"""Issues the collectives of concurrent coroutines in one order on all workers, whatever the timing.

Coroutines are started in the same order on all workers; each takes a ticket. The k-th collective of every
coroutine travels on the k-th lane, in the order of tickets: one that comes early is held until every earlier
coroutine has issued its own k-th collective or has ended. From the fourth on they share the last lane, on
which a coroutine goes after the end of all earlier ones. Waiting for one's turn cannot deadlock, since a
coroutine only ever waits for earlier ones. Groups of workers have lanes of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.wire.base import Lane
from thinwire.wire.work import Work

Ranks = tuple[int, ...]
Phase = tuple[Ranks | None, int]
"""Which group (None: all workers), and how many collectives a coroutine has issued there before."""
Start = Callable[[Lane], Work]
LAST_LANE = 3
"""Collectives of a coroutine after so many share a lane: each lane costs connections to all peers."""


@dataclass(slots=True)
class _Held:
    """A collective that waits for its turn."""

    start: Start
    work: Work
    ready: Callable[[], None] | None
    """Makes the issuing stream wait for the data, if it was written on another one."""


@dataclass(slots=True)
class Ticket:
    """A coroutine's place in the order."""

    number: int
    asked: dict[Ranks | None, int] = field(default_factory=dict)
    passed: set[Phase] = field(default_factory=set)
    """Phases in which it lets later tickets go."""
    held: dict[Phase, list[_Held]] = field(default_factory=dict)
    ended: bool = False


class Sequencer:
    """The order of the collectives of one kind of coroutine."""

    def __init__(self, lane: Lane, name: str, *, first: Lane | None = None) -> None:
        """`first`: the lane for the first collective of each coroutine, if it is made already."""
        self._base = lane
        self._name = name
        self._lock = threading.RLock()
        self._lanes: dict[Phase, Lane] = {} if first is None else {(None, 0): first}
        self._tickets: dict[int, Ticket] = {}
        self._next_number = 0
        self._front: dict[Phase, int] = {}
        """By phase: the number of the first ticket that has neither issued it nor ended."""

    def enter(self) -> Ticket:
        """Take the next place; called in the same order on all workers."""
        with self._lock:
            ticket = Ticket(self._next_number)
            self._tickets[ticket.number] = ticket
            self._next_number += 1
            return ticket

    def leave(self, ticket: Ticket) -> None:
        """The coroutine has ended: it issues nothing more."""
        with self._lock:
            ticket.ended = True
            self._forget(ticket)
            for phase in list(self._front):
                self._advance(phase)

    def issue(self, ticket: Ticket, ranks: Ranks | None, start: Start, data: Tensor) -> Work:
        """Start a collective when it is this ticket's turn."""
        with self._lock:
            number = ticket.asked.get(ranks, 0)
            ticket.asked[ranks] = number + 1
            phase = (ranks, min(number, LAST_LANE))
            if phase not in self._front:
                self._front[phase] = min(self._tickets, default=ticket.number)
            self._advance(phase)
            if self._front[phase] != ticket.number:
                held = _Held(start, Work(), _stream_guard(data))
                ticket.held.setdefault(phase, []).append(held)
                return held.work
            work = start(self._lane(phase))
            if phase[1] < LAST_LANE:
                ticket.passed.add(phase)
            self._advance(phase)
            return work

    def _advance(self, phase: Phase) -> None:
        """Start every held collective whose turn has come."""
        while self._front[phase] < self._next_number:
            ticket = self._tickets.get(self._front[phase])
            if ticket is not None:
                for held in ticket.held.pop(phase, []):
                    if held.ready is not None:
                        held.ready()
                    held.work.follow(held.start(self._lane(phase)))
                    if phase[1] < LAST_LANE:
                        ticket.passed.add(phase)
                if not ticket.ended and phase not in ticket.passed:
                    return
                self._forget(ticket)
            self._front[phase] += 1

    def _forget(self, ticket: Ticket) -> None:
        if ticket.ended and not ticket.held:
            self._tickets.pop(ticket.number, None)

    def _lane(self, phase: Phase) -> Lane:
        if phase not in self._lanes:
            ranks, number = phase
            self._lanes[phase] = self._base.lane(f"{self._name} {number}", ranks)
        return self._lanes[phase]


def _stream_guard(data: Tensor) -> Callable[[], None] | None:
    if not data.is_cuda:
        return None
    written = torch.cuda.current_stream(data.device).record_event()
    return lambda: torch.cuda.current_stream(data.device).wait_event(written)


def group_of(ranks: Sequence[int], lane: Lane) -> Ranks | None:
    """How a group is named: None if it is everybody, in order of rank."""
    group = tuple(ranks)
    return None if group == tuple(range(lane.world_size)) else group
