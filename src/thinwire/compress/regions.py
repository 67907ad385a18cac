"""Indices cut into regions, one for each owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.compress.sparse import Sparse


def split(entries: Sparse, starts: Sequence[int]) -> list[Sparse]:
    """The entries of each region, as views; `starts` says where regions begin, the first at 0."""
    places = torch.tensor(starts[1:], dtype=torch.int32, device=entries.index.device)
    cuts = [0, *torch.searchsorted(entries.index, places).tolist(), entries.index.numel()]
    return [Sparse(*(t[low:high] for t in entries)) for low, high in zip(cuts, cuts[1:], strict=False)]


def even_starts(regions: Sequence[Sparse]) -> list[int]:
    """Where regions would have to begin for all to have as many of these entries, which are in order; none
    if there are fewer entries than regions."""
    index = torch.cat([entries.index for entries in regions])
    if index.numel() < len(regions):
        return []
    places = torch.arange(1, len(regions), device=index.device) * index.numel() // len(regions)
    return [0, *index[places].tolist()]
