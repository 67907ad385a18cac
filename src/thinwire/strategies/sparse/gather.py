"""Everybody's message to everyone in log2(P) exchanges, where a ring takes P - 1: sparse messages are
small."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from thinwire.wire.wire import Wire


def _stages(world_size: int) -> Iterator[tuple[int, int]]:
    """Distance to the peers of each exchange, and how many messages travel in it.

    >>> list(_stages(8)), list(_stages(5))
    ([(1, 1), (2, 2), (4, 4)], [(1, 1), (2, 2), (4, 1)])
    """
    distance = 1
    while distance < world_size:
        yield distance, min(distance, world_size - distance)
        distance *= 2


async def gather(own: Tensor, wire: Wire, *, tag: int) -> Tensor:
    """The messages of all workers, one after another in order of rank.

    Each worker hands on all it has so far (Bruck's algorithm), so it works for any number of them.
    """
    rank, world_size = wire.rank, wire.world_size
    rows = own.new_empty((world_size, own.numel()))  # of this worker, of the next one, and so on
    rows[0] = own
    for number, (distance, count) in enumerate(_stages(world_size)):
        await wire.exchange(
            send=rows[:count].view(-1),
            to=(rank - distance) % world_size,
            recv=rows[distance : distance + count].view(-1),
            source=(rank + distance) % world_size,
            tag=tag + number,
        )
    return rows.roll(rank, 0).view(-1)
