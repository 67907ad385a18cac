"""The mean of what workers have changed, the same bits on all of them: exact, or as much as a codec shows.

With a codec every worker owns a region of the vector. All send their changes there, encoded; the owner adds
them up and sends the sum to everyone, encoded again. So a worker sends the same number of bytes however many
workers there are. What a codec does not show is not lost: it waits in the residual of whoever encoded it, and
the sum of all residuals plus P times all that was ever returned is the sum of all changes.
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


async def encoded_mean_(moved: Tensor, residual: Tensor, codec: Codec, wire: Wire) -> None:
    """Overwrite `moved` with an estimate of its mean; `residual` keeps what this worker has not shown."""
    world_size, rank = wire.world_size, wire.rank
    if world_size == 1:
        return
    numel = region_numel(moved.numel(), world_size)
    meant = residual.new_zeros((world_size, numel))
    flat = meant.view(-1)[: moved.numel()]
    torch.add(moved, residual, out=flat)
    num_bytes = codec.num_bytes(numel, meant.element_size())
    parcels, inbox = (moved.new_empty((world_size, num_bytes), dtype=torch.uint8) for _ in range(2))
    meant -= codec.encode_(parcels, meant)
    await wire.all_to_all(parcels.view(-1), inbox.view(-1))
    # Of its own numbers the owner knows also what the codec does not show.
    total = codec.decode(inbox, meant[rank]).sum(0).add_(meant[rank])
    meant[rank] = total - codec.encode_(parcels[:1], total[None])[0]
    await wire.all_gather(parcels[0], inbox.view(-1))
    residual.copy_(flat)
    moved.copy_(codec.decode(inbox, total).view(-1)[: moved.numel()]).div_(world_size)


def region_numel(numel: int, world_size: int) -> int:
    """Numbers in a region: whole chunks, so that none is cut."""
    return -(-numel // (world_size * CHUNK)) * CHUNK


def encoded_bytes(numel: int, itemsize: int, codec: Codec, world_size: int) -> int:
    """Bytes that a worker sends for the encoded mean of so many numbers."""
    return 2 * (world_size - 1) * codec.num_bytes(region_numel(numel, world_size), itemsize)
