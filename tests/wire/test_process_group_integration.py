from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.wire.operations import check_all, check_lanes
from tests.worlds import run_processes
from thinwire.wire.base import Work
from thinwire.wire.process_group import connect

pytestmark = pytest.mark.processes


def use_everything() -> None:
    wire = connect(None, timeout_s=60)
    assert wire is not None
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        check_all(wire, dtype)
    check_lanes(wire)
    wire.all_reduce_(torch.zeros(1)).wait()
    wire.close()
    for _ in range(3):  # groups are used again, with nothing left of their last use
        again = connect(None, timeout_s=60)
        assert again is not None
        check_all(again)
        again.all_reduce_(torch.zeros(1)).wait()
        again.close()
    assert dist.distributed_c10d._world.group_count <= 3 + 1
    use_a_part()


def use_a_part() -> None:
    """Only the members of a smaller group connect over it."""
    part = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    wire = connect(part, timeout_s=60)
    assert wire is not None
    assert wire.world_size == 2
    check_all(wire)
    late = wire.exchange(recv=torch.empty(1), source=1 - wire.rank, tag=7)
    assert not late.done()
    wire.exchange(send=torch.ones(1), to=1 - wire.rank, tag=7).wait()
    late.wait()
    assert late.done()
    wire.close()


def test_every_operation_over_gloo() -> None:
    run_processes(3, use_everything)


def receive_in_any_order() -> list[int]:
    """Receives end when their message comes, not in the order they were posted."""
    wire = connect(None, timeout_s=60)
    assert wire is not None
    ended: list[int] = []
    if wire.rank == 0:
        works: list[Work] = []
        for tag in range(4):
            work = wire.exchange(recv=torch.empty(1), source=1, tag=tag)
            work.when_done(lambda tag=tag: ended.append(tag))  # type: ignore[misc]
            works.append(work)
        for work in works:
            work.wait()
    else:
        for tag in (2, 0, 3, 1):
            wire.exchange(send=torch.ones(1), to=0, tag=tag).wait()
            time.sleep(0.3)
    wire.all_reduce_(torch.zeros(1)).wait()
    wire.close()
    return ended


def test_receives_end_when_their_message_comes() -> None:
    assert run_processes(2, receive_in_any_order)[0] == [2, 0, 3, 1]
