"""Kernels for CPUs, compiled by Numba. They let other Python threads run, and use one thread each.

A magnitude is compared as an integer: without their sign bit, the bits of floats are ordered as the floats
are, NaN and infinity come last, and the largest of a block is found several numbers at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from thinwire.compress.sparse import COUNT, HEADER_WORDS, PASSED

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]
"""Indices and values of sparse entries."""

_BLOCK = 128
"""Numbers that are looked at one by one if the largest of them is above the threshold."""
_CHUNK = 1 << 17
"""Numbers of another dtype that are converted at a time, to stay in the processor's cache."""
_DIGIT = 11
"""Bits that are looked at in one pass when searching for the k-th largest."""


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither beside this file nor at home is there a place to keep it
        compiled = numba.njit(nogil=True)(function)
    return compiled


def accumulate_select(
    gradient: Tensor, residual: Tensor, threshold: float, index: Tensor, value: Tensor
) -> tuple[int, int]:
    """Add the gradient to the residual and move what is above the threshold to `index` and `value`.

    Returns how many were moved, or -1 if a number was not finite, and how many were above the threshold.
    """
    integer = _integer(residual)
    magnitude = torch.iinfo(integer).max
    limit, infinity = torch.tensor([threshold, torch.inf], dtype=residual.dtype).view(integer).tolist()
    direct = gradient.dtype == residual.dtype and gradient.is_contiguous()
    step = residual.numel() if direct else min(residual.numel(), _CHUNK)
    converted = residual.new_empty(0 if direct else step)
    marks, out = (magnitude, limit, infinity), (index.numpy(), value.numpy())
    count, passed = 0, 0
    for start in range(0, residual.numel(), step):
        added, sums = gradient[start : start + step], residual[start : start + step]
        if not direct:
            added = converted[: added.numel()].copy_(added)
        both = sums.numpy(), sums.view(integer).numpy()
        count, new = _accumulate_select(added.numpy(), both, marks, start, count, out)
        if count < 0:
            break
        passed += new
    return count, passed


@_compile
def _accumulate_select(
    gradient: Array, sums: Pair, marks: tuple[int, int, int], offset: int, count: int, out: Pair
) -> tuple[int, int]:
    (residual, bits), (magnitude, limit, infinity), (index, value) = sums, marks, out
    narrow = bits.dtype.type  # Numba would go on in int64, with half as many numbers at a time
    passed = 0
    for start in range(0, residual.size, _BLOCK):
        own = residual[start : start + _BLOCK]
        own_bits = bits[start : start + _BLOCK]
        added = gradient[start : start + _BLOCK]
        for i in range(own.size):
            own[i] += added[i]
        largest = narrow(0)
        for i in range(own.size):
            largest = max(largest, narrow(own_bits[i] & magnitude))
        if largest <= limit:
            continue
        if largest >= infinity:
            return -1, 0
        for i in range(own.size):
            if own_bits[i] & magnitude > limit:
                passed += 1
                if count < index.size:
                    index[count] = offset + start + i
                    value[count] = own[i]
                    own[i] = 0
                    count += 1
    return count, passed


def _integer(data: Tensor) -> torch.dtype:
    return torch.int32 if data.dtype == torch.float32 else torch.int64


def largest_in_rows(rows: Tensor, count: int) -> Tensor:
    """Where the entries of largest magnitude of every row are (ties: the first), in no order."""
    place = torch.empty((len(rows), count), dtype=torch.int64)
    bits = rows.contiguous().view(_integer(rows))
    _largest_in_rows(bits.numpy(), torch.iinfo(bits.dtype).max, place.numpy())
    return place


@_compile
def _largest_in_rows(bits: Array, magnitude: int, out: Array) -> None:
    narrow, count = bits.dtype.type, out.shape[1]
    kept = np.empty(count, bits.dtype)
    for row in range(bits.shape[0]):
        own, place = bits[row], out[row]
        for i in range(count):
            kept[i] = own[i] & magnitude
            place[i] = i
        weakest = np.argmin(kept)
        least = kept[weakest]
        for i in range(count, own.size):
            size = narrow(own[i] & magnitude)
            if size > least:  # seldom: of equally distributed numbers, count / i of them
                kept[weakest] = size
                place[weakest] = i
                weakest = np.argmin(kept)
                least = kept[weakest]


def split_largest(index: Tensor, value: Tensor, k: int) -> list[tuple[Tensor, Tensor]]:
    """Index and value of the k entries of largest magnitude (ties: the first), then of the others."""
    bits = value.view(_integer(value))
    sizes = min(k, index.numel()), max(0, index.numel() - k)
    parts = [(index.new_empty(size), value.new_empty(size)) for size in sizes]
    entries, kept, others = ((i.numpy(), v.numpy()) for i, v in ((index, value), *parts))
    last_shift = 8 * value.itemsize - 1 - _DIGIT
    _split_largest(entries, bits.numpy(), kept, others, torch.iinfo(bits.dtype).max, last_shift)
    return parts


@_compile
def _split_largest(entries: Pair, bits: Array, kept: Pair, others: Pair, magnitude: int, shift: int) -> None:
    (index, value), (kept_index, kept_value), (other_index, other_value) = entries, kept, others
    # The magnitude of the k-th largest, digit by digit; what is left of `missing` are those equal to it.
    missing, known, mask = kept_index.size, 0, 0
    last = (1 << _DIGIT) - 1
    counts = np.zeros(last + 1, np.int64)
    while True:
        counts[:] = 0
        for i in range(bits.size):
            size = bits[i] & magnitude
            if size & mask == known:
                counts[(size >> shift) & last] += 1
        digit = last
        while counts[digit] < missing:
            missing -= counts[digit]
            digit -= 1
        known |= digit << shift
        mask |= last << shift
        if shift == 0:
            break
        shift = max(0, shift - _DIGIT)
    num_kept, num_others = 0, 0
    for i in range(bits.size):
        size = bits[i] & magnitude
        keep = size > known
        if size == known and missing > 0:
            missing -= 1
            keep = True
        if keep:
            kept_index[num_kept] = index[i]
            kept_value[num_kept] = value[i]
            num_kept += 1
        else:
            other_index[num_others] = index[i]
            other_value[num_others] = value[i]
            num_others += 1


@_compile
def merge(first: Pair, second: Pair, out: Pair) -> int:
    """The sum of two sparse vectors into `out`; how many entries it has."""
    (a_index, a_value), (b_index, b_value), (index, value) = first, second, out
    a, b, count = 0, 0, 0
    while a < a_index.size and b < b_index.size:
        from_a, from_b = a_index[a], b_index[b]
        if from_a == from_b:
            index[count] = from_a
            value[count] = a_value[a] + b_value[b]
            a += 1
            b += 1
        elif from_a < from_b:
            index[count] = from_a
            value[count] = a_value[a]
            a += 1
        else:
            index[count] = from_b
            value[count] = b_value[b]
            b += 1
        count += 1
    for i in range(a, a_index.size):
        index[count] = a_index[i]
        value[count] = a_value[i]
        count += 1
    for i in range(b, b_index.size):
        index[count] = b_index[i]
        value[count] = b_value[i]
        count += 1
    return count


def merge_messages_(
    messages: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], capacity: int, share: tuple[int, int]
) -> tuple[Tensor, Tensor] | None:
    """What `sparse.merge_messages_` does; None, and nothing done, if one of them is not finite."""
    own, other = ((message.numpy(), value.numpy()) for message, value in zip(messages, values, strict=True))
    sums = np.empty(2 * capacity, own[1].dtype)
    bits = sums.view(f"i{sums.itemsize}")
    index, value = torch.empty(capacity, dtype=torch.int32), values[0].new_empty(capacity)
    marks = capacity, *share, np.iinfo(bits.dtype).max, 8 * sums.itemsize - 1 - _DIGIT
    count = _merge_messages(own, other, (sums, bits), (index.numpy(), value.numpy()), marks)
    return None if count < 0 else (index[:count], value[:count])


@_compile
def _merge_messages(own: Pair, theirs: Pair, room: Pair, rest: Pair, marks: tuple[int, ...]) -> int:
    (message, value), (other, other_value), (sums, bits), (rest_index, rest_value) = own, theirs, room, rest
    capacity, place, block, magnitude, shift = marks
    own_count, other_count = message[COUNT], other[COUNT]
    if own_count < 0 or other_count < 0:
        return -1
    index = np.empty(sums.size, np.int32)
    count = merge(
        (message[HEADER_WORDS : HEADER_WORDS + own_count], value[:own_count]),
        (other[HEADER_WORDS : HEADER_WORDS + other_count], other_value[:other_count]),
        (index, sums),
    )
    kept = min(count, capacity)
    _split_largest(
        (index[:count], sums[:count]),
        bits[:count],
        (message[HEADER_WORDS : HEADER_WORDS + kept], value[:kept]),
        (rest_index[: count - kept], rest_value[: count - kept]),
        magnitude,
        shift,
    )
    own_rest = 0
    for i in range(count - kept):
        if rest_index[i] % block == place:
            rest_index[own_rest] = rest_index[i]
            rest_value[own_rest] = rest_value[i]
            own_rest += 1
    message[COUNT] = kept
    message[PASSED] += other[PASSED]
    return own_rest
