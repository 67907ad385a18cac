"""The wire counts every operation and changes none; groups; who is where."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

from tests.inline import Inline
from tests.wire.operations import SIZE, every_operation, some_groups
from thinwire.engine.endpoint import Endpoint
from thinwire.traffic import Round, Traffic
from thinwire.wire.local import LocalWorld
from thinwire.wire.wire import Meter, Wire


def run(
    world_size: int,
    algorithm: Callable[[Wire], Coroutine[Any, Any, None]],
    *,
    world: LocalWorld | None = None,
) -> list[Meter]:
    """Run a coroutine on every worker, in turns of this thread; what each counted."""
    world, inline, meters = world or LocalWorld(world_size), Inline(), [Meter() for _ in range(world_size)]
    endpoints = [Endpoint(world.lane(rank), meters[rank]) for rank in range(world_size)]
    tasks = [endpoint.start(inline.driver, "reduce", algorithm) for endpoint in endpoints]
    inline.settle()
    for task in tasks:
        assert task.done(), f"deadlock: waits {task.waits_for}"
        task.wait()
    return meters


def test_counts_every_operation_and_changes_none() -> None:
    num_bytes = SIZE * 4
    rounds = [
        Round(op="all_reduce", send_bytes=num_bytes),
        Round(op="reduce_scatter", send_bytes=num_bytes),
        Round(op="all_gather", send_bytes=num_bytes),
        Round(op="all_to_all", send_bytes=num_bytes),
        *[Round(op="broadcast", send_bytes=num_bytes, source=s) for s in range(3)],
        *[Round(op="exchange", send_bytes=num_bytes, recv_bytes=num_bytes)] * 3,
    ]
    for rank, meter in enumerate(run(3, every_operation)):
        assert meter.rounds == len(rounds)
        assert meter.traffic == sum((each.traffic(rank, 3) for each in rounds), Traffic())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_operation(world_size: int) -> None:
    meters = run(world_size, every_operation)
    assert all((meter.traffic.sent_bytes > 0) == (world_size > 1) for meter in meters)


def test_groups_count_their_own_size_into_the_same_meter() -> None:
    everyone = [Round(op="all_reduce", send_bytes=4 * SIZE).traffic(rank, 3) for rank in range(3)]
    pair = Round(op="all_reduce", send_bytes=4 * SIZE).traffic(0, 2)
    swap = Round(op="exchange", send_bytes=4 * SIZE, recv_bytes=4 * SIZE).traffic(0, 2)
    meters = run(3, some_groups)
    assert [meter.traffic for meter in meters] == [
        everyone[0] + pair + swap,
        everyone[1] + pair + swap,
        everyone[2],
    ]


def test_traffic_of_one_operation_outside_a_coroutine() -> None:
    world, meter = LocalWorld(2), Meter()
    endpoints = [Endpoint(world.lane(0), meter), Endpoint(world.lane(1), Meter())]
    works = [endpoint.issue(lambda wire: wire.all_reduce_(torch.ones(10))) for endpoint in endpoints]
    assert all(work.done() for work in works)
    assert meter.traffic == Traffic(sent_bytes=40, received_bytes=40, messages=2)
    meter.reset()
    assert meter.traffic == Traffic()


def test_who_is_where() -> None:
    places = [("a", "x"), ("b", "x"), ("a", "x"), ("c", "y")]
    world = LocalWorld(4, places=places)

    async def look(wire: Wire) -> None:
        assert wire.host_of(3) == "c"
        assert wire.hosts() == [[0, 2], [1], [3]]
        assert wire.sites() == [[0, 1, 2], [3]]
        group = wire.group([3, 2, 1, 0])
        assert group.host_of(0) == "c"
        assert group.hosts() == [[0], [1, 3], [2]]
        assert group.sites() == [[0], [1, 2, 3]]

    run(4, look, world=world)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 13])
def test_all_workers_send_as_much_as_all_receive(world_size: int) -> None:
    for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        each = [Round(op=op, send_bytes=1000, source=1).traffic(r, world_size) for r in range(world_size)]
        assert sum(t.sent_bytes for t in each) == sum(t.received_bytes for t in each)
    copies = [Round(op="broadcast", send_bytes=1).traffic(r, world_size) for r in range(world_size)]
    assert [t.received_bytes for t in copies] == [0] + [1] * (world_size - 1)
