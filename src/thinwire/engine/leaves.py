"""State by parameter: flat tensors of a strategy that follow their parameters wherever these go.

A leaf belongs to a bucket and holds one number for each of its parameters' numbers (or only for the large
parameters'). It is saved by parameter name, so that it can be carried over to other buckets, to another
number of workers by the rule given where it was made, and to parameters that have shrunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.errors import DataError
from thinwire.strategies.base import OnResize

if TYPE_CHECKING:
    from thinwire.engine.buckets import ParameterBucket

Saved = dict[str, dict[str, Tensor]]
"""By leaf, then by parameter."""
Kept = Mapping[str, Sequence[Tensor | None]]
"""By parameter: for each of its dimensions the indices that are left, None if all are."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One flat tensor of a bucket."""

    data: Tensor
    on_resize: OnResize
    names: Sequence[str]
    """Of the parameters it covers, in the order they lie in it."""
    shapes: Sequence[torch.Size]

    def parts(self) -> list[tuple[str, Tensor]]:
        """Views of the data, by parameter."""
        views = self.data.split([shape.numel() for shape in self.shapes])
        return [
            (name, view.view(shape)) for name, view, shape in zip(self.names, views, self.shapes, strict=True)
        ]


def dump(buckets: Iterable[ParameterBucket]) -> Saved:
    """A copy of all leaves."""
    found: Saved = {}
    for bucket in buckets:
        for name, leaf in bucket.leaves.items():
            found.setdefault(name, {}).update((key, part.detach().clone()) for key, part in leaf.parts())
    return found


@torch.no_grad()
def load(buckets: Iterable[ParameterBucket], saved: Sequence[Saved], rank: int, world_size: int) -> None:
    """Overwrite the leaves with what all workers saved, in order of rank, however many they were."""
    parts = [
        (name, leaf.on_resize, parameter, part)
        for bucket in buckets
        for name, leaf in bucket.leaves.items()
        for parameter, part in leaf.parts()
    ]
    for name, rule, parameter, part in parts:
        mine = _share([each.get(name, {}).get(parameter) for each in saved], rule, rank, world_size)
        if mine is None:
            continue
        if mine.shape != part.shape:
            raise DataError(
                f"{name} of {parameter} does not fit: saved {tuple(mine.shape)}, "
                f"this run has {tuple(part.shape)}"
            )
        part.copy_(mine)


def _share(found: Sequence[Tensor | None], rule: OnResize, rank: int, world_size: int) -> Tensor | None:
    """This worker's part of a tensor that all workers saved; None: it stays as it was made."""
    values = [value for value in found if value is not None]
    if len(values) < len(found):
        return None  # a parameter that had no such leaf, because it counted as small then
    if len(values) == world_size:
        return values[rank]
    if rule == "sum":
        return sum(values[rank::world_size], start=torch.zeros_like(values[0]))
    if rule == "mean":
        return sum(values, start=torch.zeros_like(values[0])) / len(values)
    return values[0] if rule == "same" else None


def shrink(saved: Saved, kept: Kept) -> Saved:
    """What is left of saved leaves where parameters have kept some of their indices only."""
    return {
        name: {parameter: _select(data, kept.get(parameter, ())) for parameter, data in by_parameter.items()}
        for name, by_parameter in saved.items()
    }


def _select(data: Tensor, kept: Sequence[Tensor | None]) -> Tensor:
    for dim, index in enumerate(kept):
        if index is not None:
            data = data.index_select(dim, index.to(data.device))
    return data
