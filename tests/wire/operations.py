"""Every wire operation with its expected result, for any wire."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import torch
from torch import Tensor

from thinwire.wire.base import Wire

SIZE = 12


def blocking(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in the calling thread, which waits wherever it waits."""
    try:
        while True:
            coroutine.send(None).wait()
    except StopIteration:
        pass


def check_all(wire: Wire, dtype: torch.dtype = torch.float32) -> None:
    blocking(every_operation(wire, dtype))


def check_lanes(wire: Wire) -> None:
    blocking(some_lanes(wire))


def own(rank: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(SIZE) + 100 * rank).to(dtype)


async def every_operation(wire: Wire, dtype: torch.dtype = torch.float32) -> None:
    """Run every operation once and compare with what it promises."""
    rank, world_size = wire.rank, wire.world_size
    everyone = [own(r, dtype) for r in range(world_size)]
    total, part = torch.stack(everyone).sum(0).to(dtype), SIZE // world_size

    data = own(rank, dtype)
    await wire.all_reduce_(data)
    assert torch.equal(data, total)

    out = torch.empty(part, dtype=dtype)
    await wire.reduce_scatter(own(rank, dtype), out)
    assert torch.equal(out, total[rank * part : (rank + 1) * part])

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

    if world_size > 1:
        inbox = torch.empty(SIZE, dtype=dtype)
        anyone = wire.exchange(recv=inbox, tag=9)
        await wire.exchange(send=own(rank, dtype), to=to, tag=9)
        await anyone
        assert torch.equal(inbox, everyone[source])


async def some_lanes(wire: Wire) -> None:
    """Lanes for everyone and for some, and operations on both at once."""
    other = wire.lane("other")
    a, b = torch.ones(SIZE), torch.full((SIZE,), 2.0)
    works = [wire.all_reduce_(a), other.all_reduce_(b)]
    for work in works:
        await work
    assert torch.equal(b, 2 * a)
    pair = [0, 1] if wire.rank < 2 else [2]
    some = wire.lane("some", pair)
    assert some.world_size == len(pair)
    assert pair[some.rank] == wire.rank
    data = torch.full((SIZE,), float(wire.rank))
    await some.all_reduce_(data)
    assert data[0] == sum(pair)
