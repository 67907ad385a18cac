"""Kernels for GPUs, written in Triton.

Two, because where an entry goes depends on how many come before it. The first does the heavy traffic: it
adds, compares, and notes for each block how many numbers passed and where in the block they are. After a sum
over the blocks' counts the second moves them to the message. So entries are in order of their index and the
same in every run, and nothing waits for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.compress.sparse import SparseLayout, index_part, value_part

_BLOCK = 2048
"""Numbers that one program of the first kernel looks at; their places in it fit into int16."""
_WARPS = 4
_TILE = 64
"""Blocks that one program of the second kernel moves entries of ..."""
_SLOTS = 16
"""... so many at a time."""


def accumulate_select(
    gradient: Tensor, residual: Tensor, threshold: Tensor, message: Tensor, layout: SparseLayout
) -> None:
    """Add the gradient to the residual and move what is above the threshold to the message."""
    numel = residual.numel()
    num_blocks = triton.cdiv(numel, _BLOCK)
    places = residual.new_empty(num_blocks * _BLOCK, dtype=torch.int16)
    counts = residual.new_empty(num_blocks, dtype=torch.int32)
    spoilt = residual.new_zeros(1, dtype=torch.int32)
    notes = places, counts, spoilt
    index, value, rounded = index_part(message, layout), value_part(message, layout), layout.values == "bf16"
    bits = value.view(torch.int16) if rounded else value
    constants = {"BLOCK": _BLOCK, "TILE": _TILE, "SLOTS": _SLOTS, "ROUNDED": rounded}
    with torch.cuda.device_of(residual):  # Triton starts kernels on the current device
        _accumulate[(num_blocks,)](
            gradient, gradient.stride(0), residual, numel, threshold, *notes, BLOCK=_BLOCK, num_warps=_WARPS
        )
        ends = counts.cumsum(0, dtype=torch.int32)
        _move[(triton.cdiv(num_blocks, _TILE),)](
            residual, *notes, ends, num_blocks, message, index, bits, layout.capacity, **constants
        )


def _accumulate_kernel(
    gradient: tl.tensor,
    stride: tl.tensor,
    residual: tl.tensor,
    numel: tl.tensor,
    threshold: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    spoilt: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    at = block * BLOCK + place
    inside = at < numel
    kept = tl.load(residual + at, mask=inside, other=0.0)
    kept += tl.load(gradient + at * stride, mask=inside, other=0.0).to(kept.dtype)
    tl.store(residual + at, kept, mask=inside)
    size = tl.abs(kept)
    passed = size > tl.load(threshold)
    count = tl.sum(passed.to(tl.int32), axis=0)
    tl.store(counts + block, count)
    if count > 0:
        rank = tl.cumsum(passed.to(tl.int32), axis=0) - 1
        tl.store(places + block * BLOCK + rank, place.to(tl.int16), mask=passed)
    finite = (size < float("inf")).to(tl.int32)  # not so for NaN either
    bad = 1 - tl.min(finite, axis=0)
    tl.atomic_max(spoilt, bad, mask=bad > 0)


def _move_kernel(
    residual: tl.tensor,
    places: tl.tensor,
    counts: tl.tensor,
    spoilt: tl.tensor,
    ends: tl.tensor,
    num_blocks: tl.tensor,
    message: tl.tensor,
    index: tl.tensor,
    value: tl.tensor,
    capacity: tl.tensor,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    ROUNDED: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    bad = tl.load(spoilt)
    if program == 0:  # writes the header
        total = tl.load(ends + num_blocks - 1)
        tl.store(message, tl.where(bad > 0, -1, tl.minimum(total, capacity)))
        tl.store(message + 1, tl.where(bad > 0, 0, total))
    block = program * TILE + tl.arange(0, TILE)
    inside = block < num_blocks
    count = tl.load(counts + block, mask=inside, other=0)
    start = tl.load(ends + block, mask=inside, other=0) - count
    count = tl.where(bad > 0, 0, count)  # what is not finite stays where it can be found
    begin = block.to(tl.int64) * BLOCK
    for first in range(0, tl.max(count, axis=0), SLOTS):
        slot = first + tl.arange(0, SLOTS)
        target = start[:, None] + slot[None, :]
        moved = (slot[None, :] < count[:, None]) & (target < capacity)
        place = tl.load(places + begin[:, None] + slot[None, :], mask=moved, other=0)
        at = begin[:, None] + place
        kept = tl.load(residual + at, mask=moved, other=0.0)
        tl.store(index + target, at.to(tl.int32), mask=moved)
        if ROUNDED:
            # To the nearest bfloat16, ties to even: by hand, because Triton's interpreter only cuts off.
            most = 3.3895313892515355e38  # its largest number; what is larger must not become infinite
            near = tl.minimum(tl.maximum(kept, -most), most).to(tl.float32).to(tl.int32, bitcast=True)
            near = (near + 0x7FFF + ((near >> 16) & 1)) >> 16
            sent = (near << 16).to(tl.float32, bitcast=True)
            tl.store(value + target, near.to(tl.int16), mask=moved)
            tl.store(residual + at, kept - sent.to(kept.dtype), mask=moved)
        else:
            tl.store(value + target, kept, mask=moved)
            tl.store(residual + at, 0.0, mask=moved)


_accumulate = triton.jit(_accumulate_kernel)
_move = triton.jit(_move_kernel)
