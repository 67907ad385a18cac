"""Every operation with its expected result, for the wire on top of any lane."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.wire.base import Lane
from thinwire.wire.messages import Messenger
from thinwire.wire.sequencer import Sequencer
from thinwire.wire.wire import Meter, Wire
from thinwire.wire.work import Work

SIZE = 12


def blocking(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in the calling thread, which waits wherever it waits."""
    try:
        while True:
            coroutine.send(None).wait()
    except StopIteration:
        pass


def check_all(lane: Lane, dtype: torch.dtype = torch.float32) -> None:
    blocking(every_operation(wire_over(lane), dtype))


def wire_over(lane: Lane) -> Wire:
    sequencer, meter = Sequencer(lane, "test", first=lane), Meter()
    return Wire(lane, sequencer, sequencer.enter(), meter, Messenger(lane, meter))


def total(lane: Lane, data: Tensor) -> Work:
    """Sum over all workers, on a lane itself."""
    return lane.collective("all_reduce", data, data)


def check_lanes(lane: Lane) -> None:
    blocking(some_lanes(lane))


def own(rank: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(SIZE) + 100 * rank).to(dtype)


async def every_operation(wire: Wire, dtype: torch.dtype = torch.float32) -> None:
    """Run every operation once and compare with what it promises."""
    rank, world_size = wire.rank, wire.world_size
    everyone = [own(r, dtype) for r in range(world_size)]
    sums, part = torch.stack(everyone).sum(0).to(dtype), SIZE // world_size

    data = own(rank, dtype)
    await wire.all_reduce_(data)
    assert torch.equal(data, sums)

    out = torch.empty(part, dtype=dtype)
    await wire.reduce_scatter(own(rank, dtype), out)
    assert torch.equal(out, sums[rank * part : (rank + 1) * part])

    out = torch.empty(SIZE * world_size, dtype=dtype)
    await wire.all_gather(own(rank, dtype), out)
    assert torch.equal(out, torch.cat(everyone))

    out = torch.empty(SIZE, dtype=dtype)
    await wire.all_to_all(own(rank, dtype), out)
    assert torch.equal(out, torch.cat([e[rank * part : (rank + 1) * part] for e in everyone]))

    for source in range(world_size):
        data = own(rank, dtype)
        await wire.broadcast_(data, source=source)
        assert torch.equal(data, everyone[source])

    to, source = (rank + 1) % world_size, (rank - 1) % world_size
    inboxes = [torch.empty(SIZE, dtype=dtype) for _ in range(3)]
    works = [
        wire.exchange(send=own(rank, dtype) + tag, to=to, recv=inboxes[tag], source=source, tag=tag)
        for tag in range(3)
    ]
    for tag in reversed(range(3)):
        await works[tag]
        assert torch.equal(inboxes[tag], everyone[source] + tag)

    with pytest.raises(UsageError, match="source is None"):
        wire.exchange(recv=torch.empty(SIZE, dtype=dtype))


async def some_lanes(lane: Lane) -> None:
    """Lanes for everyone and for some, and operations on both at once."""
    other = lane.lane("other")
    a, b = torch.ones(SIZE), torch.full((SIZE,), 2.0)
    works = [total(lane, a), total(other, b)]
    for work in works:
        await work
    assert torch.equal(b, 2 * a)
    pair = [0, 1] if lane.rank < 2 else [2]
    some = lane.lane("some", pair)
    assert some.world_size == len(pair)
    assert pair[some.rank] == lane.rank
    data = torch.full((SIZE,), float(lane.rank))
    await total(some, data)
    assert data[0] == sum(pair)


async def some_groups(wire: Wire, tag: int = 0) -> None:
    """A pair and a group of one, while a collective of everybody is under way; for three workers."""
    everyone = torch.ones(SIZE)
    work = wire.all_reduce_(everyone)
    ranks = [1, 0] if wire.rank < 2 else [2]
    group = wire.group(ranks)
    assert ranks[group.rank] == wire.rank
    data, inbox = torch.full((SIZE,), float(wire.rank)), torch.zeros(SIZE)
    await group.all_reduce_(data)
    assert data[0] == sum(ranks)
    if group.world_size == 2:
        own, peer = torch.full((SIZE,), float(wire.rank)), 1 - group.rank
        await group.exchange(send=own, to=peer, recv=inbox, source=peer, tag=tag)
        assert inbox[0] == ranks[peer]
    await work
    assert everyone[0] == wire.world_size
    assert wire.group([2, 1, 0]).group([2, 1, 0]).rank == wire.rank
