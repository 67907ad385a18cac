"""Collectives of concurrent coroutines go out in the order of tickets, whatever the timing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from operator import methodcaller

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.wire.base import Lane
from thinwire.wire.local import LocalWorld
from thinwire.wire.sequencer import LAST_LANE, Ranks, Sequencer, group_of
from thinwire.wire.work import Work

DATA = torch.empty(0)
PAIR: Ranks = (0, 1)


class Recorder:
    """A sequencer whose collectives note when they start, and on which lane."""

    def __init__(self, tickets: int, *, first: Lane | None = None) -> None:
        self.lane = LocalWorld(2).lane(0)
        self.sequencer = Sequencer(self.lane, "mix", first=first)
        self.tickets = [self.sequencer.enter() for _ in range(tickets)]
        self.started: list[tuple[str, int, int]] = []
        """Lane, ticket and which of the ticket's collectives."""
        self.works: dict[tuple[int, int], Work] = {}

    def issue(self, number: int, ranks: Ranks | None = None) -> Work:
        ticket = self.tickets[number]
        count = ticket.asked.get(ranks, 0)
        return self.sequencer.issue(ticket, ranks, self._start(number, count), DATA)

    def _start(self, number: int, count: int) -> Callable[[Lane], Work]:
        def start(lane: Lane) -> Work:
            name = getattr(lane, "_name")  # noqa: B009  # of a local lane
            self.started.append((name, number, count))
            return self.works.setdefault((number, count), Work())

        return start

    def leave(self, number: int) -> None:
        self.sequencer.leave(self.tickets[number])

    def order(self) -> list[tuple[int, int]]:
        return [(number, count) for _, number, count in self.started]


def test_a_collective_waits_for_the_same_one_of_earlier_tickets() -> None:
    recorder = Recorder(3)
    early = [recorder.issue(2), recorder.issue(1)]
    assert recorder.started == []
    recorder.issue(0)
    assert recorder.order() == [(0, 0), (1, 0), (2, 0)]
    assert not early[1].done()
    recorder.works[1, 0].finish()
    assert early[1].done(), "a held work ends with the operation"


def test_the_kth_collective_travels_on_the_kth_lane() -> None:
    recorder = Recorder(2)
    for _ in range(3):
        recorder.issue(0)
    assert recorder.order() == [(0, 0), (0, 1), (0, 2)], "one's own are not held"
    recorder.issue(1)
    assert recorder.started == [("/mix 0", 0, 0), ("/mix 1", 0, 1), ("/mix 2", 0, 2), ("/mix 0", 1, 0)]


def test_the_first_lane_may_be_made_already() -> None:
    lane = LocalWorld(2).lane(0).lane("made")
    recorder = Recorder(1, first=lane)
    recorder.issue(0)
    recorder.issue(0)
    assert [name for name, _, _ in recorder.started] == ["/made", "/mix 1"]


def test_tickets_that_ended_are_skipped() -> None:
    recorder = Recorder(4)
    recorder.issue(3)
    recorder.issue(3)
    recorder.leave(1)
    recorder.issue(0)
    assert recorder.order() == [(0, 0)]
    recorder.leave(2)
    assert recorder.order() == [(0, 0), (3, 0)]
    recorder.leave(0)  # has no second one
    assert recorder.order() == [(0, 0), (3, 0), (3, 1)]


def test_an_ended_ticket_still_starts_what_it_has_asked_for() -> None:
    recorder = Recorder(3)
    recorder.issue(2)
    recorder.issue(1)
    recorder.leave(1)  # its coroutine does not wait for the work
    assert recorder.started == []
    recorder.issue(0)
    assert recorder.order() == [(0, 0), (1, 0), (2, 0)]


def test_from_the_fourth_on_a_ticket_goes_after_the_end_of_earlier_ones() -> None:
    recorder = Recorder(2)
    for _ in range(LAST_LANE + 2):
        recorder.issue(1)
    for _ in range(LAST_LANE + 1):
        recorder.issue(0)
    assert recorder.order()[-1] == (0, LAST_LANE)
    assert (1, LAST_LANE) not in recorder.order()
    recorder.issue(0)
    assert recorder.started[-1] == (f"/mix {LAST_LANE}", 0, LAST_LANE + 1)
    recorder.leave(0)
    assert recorder.started[-2:] == [(f"/mix {LAST_LANE}", 1, LAST_LANE + i) for i in (0, 1)]


def test_groups_have_an_order_of_their_own() -> None:
    recorder = Recorder(2)
    recorder.issue(1, PAIR)
    recorder.issue(0)
    assert recorder.order() == [(0, 0)]
    recorder.issue(1)
    assert recorder.order() == [(0, 0), (1, 0)], "everybody's does not wait for the group's"
    recorder.issue(0, PAIR)
    assert recorder.order()[2:] == [(0, 0), (1, 0)]


def test_a_group_of_everybody_in_order_is_everybody() -> None:
    lane = LocalWorld(3).lane(0)
    assert group_of([0, 1, 2], lane) is None
    assert group_of([0, 2, 1], lane) == (0, 2, 1)
    assert group_of([0, 2], lane) == (0, 2)


def test_nothing_is_kept_of_tickets_that_ended() -> None:
    recorder = Recorder(0)
    for number in range(5):
        recorder.tickets.append(recorder.sequencer.enter())
        recorder.issue(number)
        recorder.leave(number)
    assert recorder.order() == [(number, 0) for number in range(5)]
    assert recorder.sequencer._tickets == {}


counts = st.lists(st.integers(0, LAST_LANE + 3), min_size=1, max_size=4)


@given(counts, st.data())
@settings(max_examples=200)
def test_every_interleaving_gives_each_lane_one_order(per_ticket: list[int], data: st.DataObject) -> None:
    """Two workers that go on in any order start the same collectives in the same order on every lane."""
    steps = [number for number, count in enumerate(per_ticket) for _ in range(count + 1)]
    lanes: list[dict[str, list[tuple[int, int]]]] = []
    for _ in range(2):
        recorder, left = Recorder(len(per_ticket)), list(per_ticket)
        for number in data.draw(st.permutations(steps)):
            left[number] -= 1
            recorder.leave(number) if left[number] < 0 else recorder.issue(number)
        assert len(recorder.started) == sum(per_ticket), "all have started"
        found: dict[str, list[tuple[int, int]]] = {}
        for name, number, count in recorder.started:
            found.setdefault(name, []).append((number, count))
        assert all(each == sorted(each) for each in found.values())
        lanes.append(found)
    assert lanes[0] == lanes[1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_sums_are_right_in_any_order_of_two_workers(order: tuple[int, ...]) -> None:
    world = LocalWorld(2)
    sequencers = [Sequencer(world.lane(rank), "reduce") for rank in range(2)]
    tickets = [[sequencer.enter() for _ in range(3)] for sequencer in sequencers]
    sums = [[torch.tensor([10.0**number]) for number in range(3)] for _ in range(2)]
    works = []
    for rank, numbers in ((0, (0, 1, 2)), (1, order)):
        for number in numbers:
            data = sums[rank][number]
            start = methodcaller("collective", "all_reduce", data, data)
            works.append(sequencers[rank].issue(tickets[rank][number], None, start, data))
    assert all(work.done() for work in works)
    assert [float(data) for data in sums[0]] == [float(data) for data in sums[1]] == [2.0, 20.0, 200.0]
