"""Sparse vectors: in and out of messages, merged, cut to the largest, dealt out by regions, made dense.

A message is int32 words: a header of two, the indices, the values; each part begins at a multiple of 8 bytes.
It always has room for the same number of entries and says in its first word how many there are, so that
workers need not tell each other sizes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from thinwire.compress.kernels import cpu_kernels
from thinwire.errors import NumericError, check, check_one_of

Values = Literal["fp32", "bf16"]
"""Formats of a value. "fp32" leaves it as it is, also in a float64 model."""

COUNT = 0
"""The word that says how many entries are in the message, or NOT_FINITE."""
PASSED = 1
"""The word that says how many were above the threshold; those without room stayed in the residual."""
HEADER_WORDS = 2
NOT_FINITE = -1
"""A count that says: a NaN or an infinity was met, there are no entries."""

LARGEST_INDEX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """Where things lie in a sparse message; the same at both ends.

    >>> SparseLayout(capacity=1000).num_bytes, SparseLayout(capacity=1000, values="bf16").num_bytes
    (8008, 6008)
    """

    capacity: int
    """Entries a message has room for."""
    values: Values = "fp32"
    itemsize: int = 4
    """Bytes of a number in the residual."""

    def __post_init__(self) -> None:
        check(self.capacity >= 1, "capacity", "at least 1", self.capacity)
        check_one_of("values", self.values, ("fp32", "bf16"))
        check_one_of("itemsize", self.itemsize, (4, 8))

    @property
    def values_at(self) -> int:
        """The word at which values begin."""
        return HEADER_WORDS + self.capacity + self.capacity % 2

    @property
    def num_words(self) -> int:
        value_bytes = self.capacity * (self.itemsize if self.values == "fp32" else 2)
        return self.values_at + -(-value_bytes // 8) * 2

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of numbers in the residual."""
        return torch.float32 if self.itemsize == 4 else torch.float64

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_words


@dataclass(frozen=True, slots=True)
class Sparse:
    """The entries of a vector that are there; all others are zero."""

    index: Tensor
    """int32, ascending, none twice."""
    value: Tensor
    """float32, or float64 in a float64 model."""


# -- messages -------------------------------------------------------------------------------------


def new_message(layout: SparseLayout, like: Tensor) -> Tensor:
    """A message without entries on the device of `like`."""
    return new_words(layout.num_words, like.device)


def new_words(count: int, device: torch.device | str) -> Tensor:
    """A tensor of `count` words, all zero."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def index_part(message: Tensor, layout: SparseLayout) -> Tensor:
    """Where indices lie: a view, as long as the capacity."""
    return message[HEADER_WORDS : HEADER_WORDS + layout.capacity]


def value_part(message: Tensor, layout: SparseLayout) -> Tensor:
    """Where values lie, as they look on the wire: a view, as long as the capacity."""
    assert message.numel() == layout.num_words, "a message of another layout"
    dtype = layout.dtype if layout.values == "fp32" else torch.bfloat16
    return message[layout.values_at :].view(dtype)[: layout.capacity]


def read(message: Tensor, layout: SparseLayout) -> Sparse:
    """The entries of a message: views of it where values are "fp32", else a copy. Waits for the device."""
    count = int(message[COUNT])
    if count == NOT_FINITE:
        raise NumericError(
            "a worker met NaN or infinity in its gradients and sent none",
            hint="the error on that worker names the parameter; lower the learning rate or clip gradients",
        )
    value = value_part(message, layout)[:count].to(layout.dtype)
    return Sparse(index_part(message, layout)[:count], value)


def write_(message: Tensor, layout: SparseLayout, entries: Sparse) -> None:
    """Overwrite a message with entries that it has room for; "bf16" rounds their values."""
    count = entries.index.numel()
    assert count <= layout.capacity, "more entries than the message has room for"
    index_part(message, layout)[:count] = entries.index
    value_part(message, layout)[:count] = entries.value
    message[COUNT] = count
    message[PASSED] = count


def merge_messages_(message: Tensor, other: Tensor, layout: SparseLayout, share: tuple[int, int]) -> Sparse:
    """Overwrite a message with the largest entries of its sum with another, as many as it has room for.

    `share` is (place, block): returned are, of the other entries and of what "bf16" cuts off those kept, the
    ones with an index of `place` modulo `block`. So `block` workers that merge the same two messages, each
    with another place, have all of it together.
    """
    kernels = cpu_kernels(message) if layout.values == "fp32" else None
    if kernels is not None:
        values = value_part(message, layout), value_part(other, layout)
        rest = kernels.merge_messages_((message, other), values, layout.capacity, share)
        if rest is not None:
            return Sparse(*rest)
    kept, dropped = keep_largest(merge(read(message, layout), read(other, layout)), layout.capacity)
    passed = message[PASSED] + other[PASSED]
    write_(message, layout, kept)
    message[PASSED] = passed
    if layout.values == "bf16":
        dropped = merge(dropped, Sparse(kept.index, kept.value - read(message, layout).value))
    place, block = share
    return _where(dropped.index % block == place, dropped)


# -- arithmetic -----------------------------------------------------------------------------------


def merge(a: Sparse, b: Sparse) -> Sparse:
    """The sum of two sparse vectors."""
    if kernels := cpu_kernels(a.value):
        numel = a.index.numel() + b.index.numel()
        out = Sparse(a.index.new_empty(numel), a.value.new_empty(numel))
        count = kernels.merge(*((each.index.numpy(), each.value.numpy()) for each in (a, b, out)))
        return Sparse(out.index[:count], out.value[:count])
    return merge_torch(a, b)


def merge_torch(a: Sparse, b: Sparse) -> Sparse:
    """The sum of two sparse vectors, in plain torch."""
    index, order = torch.cat((a.index, b.index)).sort(stable=True)
    value = torch.cat((a.value, b.value))[order]
    again = index[1:] == index[:-1]  # an index is there twice at most, once from each
    value[:-1] += torch.where(again, value[1:], 0)
    first = torch.ones_like(index, dtype=torch.bool)
    first[1:] = ~again
    return _where(first, Sparse(index, value))


def keep_largest(entries: Sparse, k: int) -> tuple[Sparse, Sparse]:
    """The k entries of largest magnitude, and the others; of equal ones those of lower index are kept."""
    k = max(0, k)
    if kernels := cpu_kernels(entries.value):
        kept, others = kernels.split_largest(entries.index, entries.value, k)
        return Sparse(*kept), Sparse(*others)
    keep = largest_mask(entries.value, k)
    return _where(keep, entries), _where(~keep, entries)


def without(entries: Sparse, index: Tensor) -> Sparse:
    """The entries whose index is not among `index`, which is ascending."""
    if index.numel() == 0:
        return entries
    place = torch.searchsorted(index, entries.index, out_int32=True).clamp_(max=index.numel() - 1)
    return _where(index[place] != entries.index, entries)


def _where(mask: Tensor, entries: Sparse) -> Sparse:
    return Sparse(entries.index[mask], entries.value[mask])


def add_(dense: Tensor, entries: Sparse, scale: float = 1.0) -> None:
    """dense[index] += scale * value, on the device of `dense`."""
    dense.index_add_(0, entries.index.to(dense.device), entries.value.to(dense), alpha=scale)


def largest_mask(data: Tensor, k: int) -> Tensor:
    """True at the k numbers of largest magnitude; of equal ones at the first."""
    if k >= data.numel():
        return torch.ones_like(data, dtype=torch.bool)
    if k == 0:
        return torch.zeros_like(data, dtype=torch.bool)
    size = data.abs()
    smallest = size.topk(k, sorted=False).values.min()
    above, equal = size > smallest, size == smallest
    return above | (equal & (equal.cumsum(0) <= k - above.sum()))


# -- many messages at once, as rows; an entry is in the row of the region of its index ------------


def deal_(rows: Tensor, layout: SparseLayout, entries: Sparse, starts: list[int]) -> tuple[Sparse, Sparse]:
    """Write each entry into the row of its region, where `starts` says where regions begin.

    Gives the entries that fit, and those of regions with more entries than a row has room for.
    """
    index = entries.index
    borders = torch.tensor(starts[1:], dtype=index.dtype, device=index.device)
    row = torch.searchsorted(borders, index, right=True)
    passed = row.bincount(minlength=len(starts))
    place = torch.arange(index.numel(), device=index.device) - (passed.cumsum(0) - passed)[row]
    rows[:, COUNT] = passed.clamp(max=layout.capacity)
    rows[:, PASSED] = passed
    fits = place < layout.capacity
    row, place, fitting = row[fits], place[fits], _where(fits, entries)
    index_rows, value_rows = _parts(rows, layout)
    index_rows[row, place] = fitting.index
    value_rows[row, place] = fitting.value.to(value_rows.dtype)
    return fitting, _where(~fits, entries)


def collect(rows: Tensor, layout: SparseLayout) -> Sparse:
    """The entries of all rows, row after row; an index may be there several times."""
    index_rows, value_rows = _parts(rows, layout)
    there = torch.arange(layout.capacity, device=rows.device) < rows[:, COUNT, None]
    return Sparse(index_rows[there], value_rows[there].to(layout.dtype))


def add_up(entries: Sparse) -> Sparse:
    """Entries of any order with those of one index added up, in the order they come."""
    index, order = entries.index.sort(stable=True)
    unique, place = torch.unique_consecutive(index, return_inverse=True)
    sums = entries.value.new_zeros(unique.numel())
    return Sparse(unique, sums.index_add_(0, place, entries.value[order]))


def even_starts(index: Tensor, count: int) -> list[int]:
    """Where `count` regions begin that have equally many of these ascending indices; none if too few."""
    if index.numel() < count:
        return []
    places = torch.arange(1, count, device=index.device) * index.numel() // count
    return [0, *index[places].tolist()]


def _parts(rows: Tensor, layout: SparseLayout) -> tuple[Tensor, Tensor]:
    """Indices and values of all rows: views."""
    index = rows[:, HEADER_WORDS : HEADER_WORDS + layout.capacity]
    like = value_part(rows[0, : layout.num_words], layout)
    values = rows[:, layout.values_at : layout.num_words].view(like.dtype)
    return index, values[:, : layout.capacity]
