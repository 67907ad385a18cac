from __future__ import annotations

import queue
import threading

import pytest
import torch
import torch.distributed as dist

from tests.wire.operations import check_all, check_lanes, every_operation, some_groups, total
from tests.worlds import run_processes
from thinwire.engine.driver import Driver, ProgressThread
from thinwire.engine.endpoint import Endpoint, Make
from thinwire.errors import PeerLost
from thinwire.wire.backend import pool
from thinwire.wire.base import Lane
from thinwire.wire.connect import connect
from thinwire.wire.messages import Messenger
from thinwire.wire.wire import Meter

pytestmark = pytest.mark.processes


def reduce_large_parts(lane: Lane) -> None:
    """Several reduce-scatters under way on two lanes, too large for the buffers of a socket.

    The sums are exact. Nobody deadlocks, though every worker sends to one that is sending.
    """
    size = lane.world_size * 300_000
    data = [torch.arange(size, dtype=torch.float32) % 1000 + lane.rank + number for number in range(4)]
    before = [each.clone() for each in data]
    outs = [torch.empty(size // lane.world_size) for _ in data]
    lanes = [lane, lane.lane("other")]
    works = [
        lanes[number % 2].collective("reduce_scatter", each, out)
        for number, (each, out) in enumerate(zip(data, outs, strict=True))
    ]
    for number, (work, out) in enumerate(zip(works, outs, strict=True)):
        work.wait()
        ranks = lane.world_size * number + sum(range(lane.world_size))
        sums = lane.world_size * (torch.arange(size, dtype=torch.float32) % 1000) + ranks
        assert torch.equal(out, sums.chunk(lane.world_size)[lane.rank])
        assert torch.equal(data[number], before[number])


def use_everything() -> None:
    lane = connect(None, timeout_s=500, silence_s=500)
    assert lane is not None
    reduce_large_parts(lane)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        check_all(lane, dtype)
    check_lanes(lane)
    use_wires(lane)
    total(lane, torch.zeros(1)).wait()
    lane.close()
    for _ in range(3):  # backends are used again, with nothing left of their last use
        again = connect(None, timeout_s=500, silence_s=500)
        assert again is not None
        check_all(again)
        use_wires(again)
        total(again, torch.zeros(1)).wait()
        again.close()
    assert set(pool._made.values()) == {1}
    assert dist.distributed_c10d._world.group_count == 1
    use_a_part()


def use_wires(lane: Lane) -> None:
    """Several coroutines at once, each with a wire of its own."""
    progress = ProgressThread("progress")
    driver, endpoint = Driver(progress.soon, progress.soon), Endpoint(lane, Meter())
    algorithms: list[Make] = [
        every_operation,
        *(lambda wire, tag=tag: some_groups(wire, tag) for tag in (20, 21)),
    ]
    tasks = [endpoint.start(driver, "reduce", algorithm) for algorithm in algorithms]
    try:
        assert all(task.wait(500) for task in tasks)
    finally:
        progress.stop()


def use_a_part() -> None:
    """Only the members of a smaller group connect over it."""
    part = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    lane = connect(part, timeout_s=500, silence_s=500)
    assert lane is not None
    assert lane.world_size == 2
    check_all(lane)
    late = lane.exchange(recv=torch.empty(1), source=1 - lane.rank, tag=7)
    assert not late.done()
    lane.exchange(send=torch.ones(1), to=1 - lane.rank, tag=7).wait()
    late.wait()
    assert late.done()
    lane.close()


def test_every_operation_over_gloo() -> None:
    run_processes(3, use_everything)


def receive_in_any_order() -> list[int]:
    lane = connect(None, timeout_s=500, silence_s=500)
    assert lane is not None
    return receive_in_any_order_on(lane)


def receive_in_any_order_on(lane: Lane) -> list[int]:
    """Receives end when their message comes, not in the order they were posted."""
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    order: list[int] = []
    if lane.rank == 0:
        for tag in range(4):
            work = lane.exchange(recv=torch.empty(1), source=1, tag=tag)
            work.when_done(lambda tag=tag: ended.put(tag))  # type: ignore[misc]
        for number in range(4):
            order.append(ended.get(timeout=500))
            lane.exchange(send=torch.ones(1), to=1, tag=10 + number).wait()
    else:
        for number, tag in enumerate((2, 0, 3, 1)):
            lane.exchange(send=torch.ones(1), to=0, tag=tag).wait()
            lane.exchange(recv=torch.empty(1), source=0, tag=10 + number).wait()
    total(lane, torch.zeros(1)).wait()
    lane.close()
    return order


def listen_and_drop() -> list[str]:
    """The threads that still wait in a backend after a lane with a listener was dropped."""
    lane = connect(None, timeout_s=500, silence_s=500)
    assert lane is not None
    total(lane, torch.zeros(1)).wait()
    Messenger(lane, Meter()).listen(torch.zeros(1), holds=False)
    dist.barrier()  # nobody drops the lane while another is still in the sum
    lane.drop(PeerLost("the workers have changed"))
    return [each.name for each in threading.enumerate() if each.name.startswith("thinwire-exchange")]


def test_nobody_waits_for_messages_of_a_world_that_is_gone() -> None:
    assert run_processes(3, listen_and_drop) == [[], [], []]


def test_receives_end_when_their_message_comes() -> None:
    assert run_processes(2, receive_in_any_order)[0] == [2, 0, 3, 1]
