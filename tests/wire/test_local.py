"""Lanes between threads: every operation, order, errors, and media that take their time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.wire.operations import check_all, check_lanes, total
from tests.worlds import run_threads
from thinwire.errors import PeerDiffers, PeerLost
from thinwire.traffic import Round
from thinwire.wire.local import Call, Immediate, LocalLane, LocalWorld, NotAlike


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_operation(world_size: int) -> None:
    run_threads(world_size, check_all)


def test_lanes() -> None:
    run_threads(3, check_lanes)


def test_collectives_end_in_the_order_they_were_issued() -> None:
    def worker(lane: LocalLane) -> list[int]:
        order: list[int] = []
        works = [total(lane, torch.ones(4)) for _ in range(50)]
        for number, work in enumerate(works):
            work.when_done(lambda number=number: order.append(number))  # type: ignore[misc]
        works[-1].wait()
        return order

    for order in run_threads(3, worker):
        assert order == sorted(order)


def test_operations_that_do_not_match_are_refused_everywhere() -> None:
    def worker(lane: LocalLane) -> None:
        with pytest.raises(PeerDiffers, match=r"does .* where another does") as caught:
            total(lane, torch.ones(3 if lane.rank == 0 else 4)).wait(10)
        assert "same strategy with the same settings" in caught.value.hint

    run_threads(2, worker)


def test_a_lost_world_fails_operations_under_way_and_later_ones() -> None:
    world = LocalWorld(2)
    lane, lost = world.lane(0), PeerLost("worker 1 is gone", rank=1)
    waiting = [total(lane, torch.ones(1)), lane.exchange(recv=torch.ones(1), source=1)]
    world.lose(lost)
    for work in [*waiting, total(lane, torch.ones(1)), lane.exchange(send=torch.ones(1), to=1)]:
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            work.wait(1)


def test_a_send_ends_when_its_receive_is_posted() -> None:
    world = LocalWorld(2)
    send = world.lane(0).exchange(send=torch.ones(1), to=1)
    assert not send.done()
    world.lane(1).exchange(recv=torch.zeros(1), source=0, tag=1)
    assert not send.done(), "another tag"
    inbox = torch.zeros(1)
    assert world.lane(1).exchange(recv=inbox, source=0).done()
    assert send.done()
    assert inbox.item() == 1


class Slow(Immediate):
    """Ends nothing by itself."""

    def __init__(self) -> None:
        self.sent: list[Call] = []
        self.arrived: list[Call] = []
        self.collectives: list[Call] = []

    def transfer(self, source: int, to: int, num_bytes: int, sent: Call, arrived: Call) -> None:
        self.sent.append(sent)
        self.arrived.append(arrived)

    def collective(self, what: Round, ranks: Sequence[int], ended: Call) -> None:
        self.collectives.append(ended)


def test_messages_from_anyone_come_in_order_and_end_when_the_medium_says() -> None:
    medium = Slow()
    world = LocalWorld(3, medium)
    sends = [world.lane(rank).exchange(send=torch.tensor([rank]), to=2, tag=1) for rank in (1, 0)]
    inboxes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    receives = [world.lane(2).exchange(recv=inbox, tag=1) for inbox in inboxes]
    works = [*sends, *receives]
    assert not any(work.done() for work in works)
    medium.arrived[1]()
    assert [work.done() for work in works] == [False, False, False, True]
    medium.sent[0]()
    assert [work.done() for work in works] == [True, False, False, True]
    medium.sent[1]()
    medium.arrived[0]()
    assert all(work.done() for work in works)
    assert [int(inbox) for inbox in inboxes] == [1, 0]


def test_an_exchange_ends_with_the_later_half_and_a_collective_when_the_medium_says() -> None:
    medium = Slow()
    world = LocalWorld(2, medium)
    both = [
        world.lane(r).exchange(send=torch.ones(1), to=1 - r, recv=torch.zeros(1), source=1 - r)
        for r in (0, 1)
    ]
    sums = [total(world.lane(rank), torch.ones(1)) for rank in (0, 1)]
    medium.sent[0]()
    assert not any(work.done() for work in (*both, *sums))
    medium.arrived[1]()
    medium.collectives[0]()
    ended = [work.done() for work in both]
    assert sorted(ended) == [False, True]
    assert all(work.done() for work in sums)
    world.lose(PeerLost("worker 1 is gone", rank=1))
    assert [type(work.error) for work in both] == [type(None) if end else PeerLost for end in ended]


def test_some_act_for_all_in_collectives_of_everybody_only() -> None:
    world = LocalWorld(4, acting=[0, 2])
    sizes = torch.ones(4, device="meta")
    first = total(world.lane(0), sizes)
    assert not first.done()
    assert total(world.lane(2), sizes).done()
    assert first.done()
    with pytest.raises(NotAlike, match="exchanges"):
        world.lane(0).exchange(send=sizes, to=1)
    with pytest.raises(NotAlike, match="broadcasts"):
        world.lane(0).collective("broadcast", sizes, sizes)
    with pytest.raises(NotAlike, match="collectives of some"):
        world.lane(0).lane("pair", [0, 1])
