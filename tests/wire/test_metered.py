from __future__ import annotations

import pytest
import torch

from tests.wire.operations import SIZE, check_all
from tests.worlds import run_threads
from thinwire.traffic import Round, Traffic, total
from thinwire.wire.base import Wire
from thinwire.wire.metered import Meter, MeteredWire


def test_counts_every_operation_and_changes_none() -> None:
    def worker(wire: Wire) -> Meter:
        meter = Meter()
        check_all(MeteredWire(wire, meter))
        return meter

    num_bytes = SIZE * 4
    rounds = [
        Round(op="all_reduce", send_bytes=num_bytes),
        Round(op="reduce_scatter", send_bytes=num_bytes),
        Round(op="all_gather", send_bytes=num_bytes),
        Round(op="all_to_all", send_bytes=num_bytes),
        *[Round(op="broadcast", send_bytes=num_bytes, source=s) for s in range(3)],
        *[Round(op="exchange", send_bytes=num_bytes, recv_bytes=num_bytes)] * 3,
        Round(op="exchange", recv_bytes=num_bytes),
        Round(op="exchange", send_bytes=num_bytes),
    ]
    for rank, meter in enumerate(run_threads(3, worker)):
        assert meter.rounds == len(rounds)
        assert meter.traffic == total(rounds, rank=rank, world_size=3)


def test_lanes_count_into_the_same_meter() -> None:
    def worker(wire: Wire) -> Meter:
        meter = Meter()
        MeteredWire(wire, meter).lane("side").all_reduce_(torch.ones(10)).wait()
        return meter

    for meter in run_threads(2, worker):
        assert meter.traffic == Traffic(sent_bytes=40, received_bytes=40, messages=2)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 13])
def test_what_all_workers_send_is_what_all_receive(world_size: int) -> None:
    for op in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"):
        each = [Round(op=op, send_bytes=1000, source=1).traffic(r, world_size) for r in range(world_size)]
        assert sum(t.sent_bytes for t in each) == sum(t.received_bytes for t in each)
    copies = [Round(op="broadcast", send_bytes=1).traffic(r, world_size) for r in range(world_size)]
    assert [t.received_bytes for t in copies] == [0] + [1] * (world_size - 1)
