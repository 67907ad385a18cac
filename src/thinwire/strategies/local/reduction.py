"""The mean of what workers have changed, the same bits on all of them: exact, or as much as a codec shows.

With a codec every worker owns a region of the vector. All send their changes there, encoded; the owner adds
them up and sends the sum to everyone, encoded again. Where only the largest numbers travel, more of a sum are
sent than of each worker's changes, since workers choose different ones. So bytes do not grow with the number
of workers. Nothing is lost: what a worker has not shown it keeps, what an owner has not passed on waits in
its backlog; both together, plus P times all that was ever returned, are the sum of all changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.compress.codec import CHUNK, Codec
from thinwire.wire.wire import Wire


async def mean_(moved: Tensor, wire: Wire) -> None:
    """Overwrite with the exact mean over workers."""
    await wire.all_reduce_(moved)
    moved.div_(wire.world_size)


async def encoded_mean_(moved: Tensor, backlog: Tensor, codec: Codec, wire: Wire) -> Tensor:
    """Overwrite `moved` with an estimate of its mean; gives what of its own this worker has not shown.

    `backlog`, as long as `moved`, keeps the sums that this worker as an owner has not passed on.
    """
    world_size, rank = wire.world_size, wire.rank
    if world_size == 1:
        return torch.zeros_like(moved)
    numel = region_numel(moved.numel(), world_size)
    kept = moved.new_zeros((world_size, numel))
    flat = kept.view(-1)[: moved.numel()]
    own = backlog[rank * numel : (rank + 1) * numel]  # the last regions may be short, or empty
    waiting = own.clone()
    own.zero_()
    torch.add(moved, backlog, out=flat)  # after a change of workers or buckets, also sums for other owners
    backlog.zero_()
    parcels, inbox = (_messages(moved, codec, numel, world_size) for _ in range(2))
    kept -= codec.encode_(parcels, kept)
    await wire.all_to_all(parcels.view(-1), inbox.view(-1))
    total = codec.decode(inbox, kept[rank]).sum(0)
    total[: own.numel()] += waiting
    codec = codec.of_sum(world_size)
    parcels, inbox = (_messages(moved, codec, numel, count) for count in (1, world_size))
    own.copy_((total - codec.encode_(parcels, total[None])[0])[: own.numel()])
    await wire.all_gather(parcels.view(-1), inbox.view(-1))
    moved.copy_(codec.decode(inbox, total).flatten()[: moved.numel()]).div_(world_size)
    return flat


def _messages(like: Tensor, codec: Codec, numel: int, count: int) -> Tensor:
    """Room for so many rows."""
    return like.new_empty((count, codec.num_bytes(numel, like.element_size())), dtype=torch.uint8)


def region_numel(numel: int, world_size: int) -> int:
    """Numbers in a region: whole chunks, so that none is cut."""
    return -(-numel // (world_size * CHUNK)) * CHUNK


def encoded_bytes(numel: int, itemsize: int, codec: Codec, world_size: int) -> int:
    """Bytes that a worker sends for the encoded mean of so many numbers."""
    numel = region_numel(numel, world_size)
    a_row = codec.num_bytes(numel, itemsize) + codec.of_sum(world_size).num_bytes(numel, itemsize)
    return (world_size - 1) * a_row
