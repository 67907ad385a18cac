"""Many sparse messages at once, as rows: entries dealt out by the region of their index, and added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.sparse import COUNT, HEADER_WORDS, PASSED, Sparse, SparseLayout, value_part


def deal_(
    rows: Tensor, layout: SparseLayout, entries: Sparse, starts: Sequence[int]
) -> tuple[Sparse, Sparse]:
    """Write each entry into the row of its region, where `starts` says where regions begin.

    Gives the entries that fit, and those of regions with more entries than a row has room for.
    """
    index, value = entries.index, entries.value
    borders = torch.tensor(starts[1:], dtype=index.dtype, device=index.device)
    row = torch.searchsorted(borders, index, right=True)
    passed = row.bincount(minlength=len(starts))
    place = torch.arange(index.numel(), device=index.device) - (passed.cumsum(0) - passed)[row]
    rows[:, COUNT] = passed.clamp(max=layout.capacity)
    rows[:, PASSED] = passed
    fits = place < layout.capacity
    row, place, fitting = row[fits], place[fits], Sparse(index[fits], value[fits])
    index_rows, value_rows = _parts(rows, layout)
    index_rows[row, place] = fitting.index
    value_rows[row, place] = fitting.value.to(value_rows.dtype)
    return fitting, Sparse(index[~fits], value[~fits])


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
