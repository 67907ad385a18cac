from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.wire.operations import check_all, check_lanes
from tests.worlds import run_threads
from thinwire.errors import PeerDiffers, PeerLost
from thinwire.wire.base import Wire, Work, all_of
from thinwire.wire.threads import ThreadWorld


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_operation(world_size: int) -> None:
    run_threads(world_size, check_all)


def test_lanes() -> None:
    run_threads(3, check_lanes)


def test_collectives_end_in_the_order_they_were_issued() -> None:
    def worker(wire: Wire) -> list[int]:
        order: list[int] = []
        works = [wire.all_reduce_(torch.ones(4)) for _ in range(50)]
        for number, work in enumerate(works):
            work.when_done(lambda number=number: order.append(number))  # type: ignore[misc]
        works[-1].wait()
        return order

    for order in run_threads(3, worker):
        assert order == sorted(order)


def test_operations_that_do_not_match_are_refused_everywhere() -> None:
    def worker(wire: Wire) -> None:
        wire.all_reduce_(torch.ones(3 if wire.rank == 0 else 4)).wait(10)

    with pytest.raises(PeerDiffers, match="same operations in the same order"):
        run_threads(2, worker)


def test_a_lost_world_fails_what_is_under_way_and_what_comes_after() -> None:
    world = ThreadWorld(2)
    wire, lost = world.wire(0), PeerLost("worker 1 is gone", rank=1)
    waiting = [wire.all_reduce_(torch.ones(1)), wire.exchange(recv=torch.ones(1), source=1)]
    world.lose(lost)
    for work in [*waiting, wire.all_reduce_(torch.ones(1))]:
        with pytest.raises(PeerLost, match="worker 1 is gone"):
            work.wait(1)


def test_work_ends_once_and_calls_back_once() -> None:
    work, calls = Work(), []
    work.when_done(lambda: calls.append("before"))
    assert not work.wait(0.01)
    work.finish()
    work.fail(ValueError("too late"))
    work.when_done(lambda: calls.append("after"))
    assert work.wait()
    assert calls == ["before", "after"]


def test_messages_from_anyone_come_in_order_and_when_they_are_carried() -> None:
    bags: list[Callable[[], None]] = []
    world = ThreadWorld(3, carry=bags.append)
    sends = [world.wire(rank).exchange(send=torch.tensor([rank]), to=2, tag=1) for rank in (0, 1)]
    inboxes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    first = world.wire(2).exchange(recv=inboxes[0], tag=1)
    assert not any(work.done() for work in (*sends, first))
    bags[1]()
    assert [work.done() for work in (*sends, first)] == [False, True, True]
    second = world.wire(2).exchange(recv=inboxes[1], source=0, tag=1)
    bags[0]()
    assert second.done()
    assert [int(inbox) for inbox in inboxes] == [1, 0]


def test_all_of_ends_with_the_last_and_tells_an_error() -> None:
    works = [Work(), Work()]
    together, empty = all_of(works), all_of([])
    assert empty.done()
    works[1].finish()
    assert not together.done()
    works[0].fail(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        together.wait(1)
