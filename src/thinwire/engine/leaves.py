"""State by parameter: flat tensors of a strategy that follow their parameters wherever these go.

A leaf belongs to a bucket and holds one number for each of its parameters' numbers (or only for the large
parameters'). It is saved by parameter name, so that it can be carried over to other buckets, to another
number of workers by the rule given where it was made, and to parameters that have shrunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.errors import DataError
from thinwire.strategies.base import OnResize

Saved = dict[str, dict[str, Tensor]]
"""By leaf, then by parameter."""
Kept = Mapping[str, Sequence[Tensor | None]]
"""By parameter: for each of its dimensions the indices that are left, None if all are."""


@dataclass(slots=True)
class Leaf:
    """One flat tensor of a bucket."""

    data: Tensor
    on_resize: OnResize
    names: Sequence[str]
    """Of the parameters it covers, in the order they lie in it."""
    shapes: Sequence[torch.Size]
    _before: Tensor | None = field(default=None, init=False)

    def remember_(self) -> None:
        if self._before is None:
            self._before = torch.empty_like(self.data)
        self._before.copy_(self.data)

    def undo_(self) -> None:
        if self._before is not None:
            self.data.copy_(self._before)

    def parts(self) -> list[tuple[str, Tensor]]:
        """Views of the data, by parameter."""
        views = self.data.split([shape.numel() for shape in self.shapes])
        return [
            (name, view.view(shape)) for name, view, shape in zip(self.names, views, self.shapes, strict=True)
        ]


Leaves = Mapping[str, Sequence[Leaf]]
"""By name; one for each bucket that has it."""


def collect(buckets: Sequence[Mapping[str, Leaf]]) -> dict[str, list[Leaf]]:
    """The leaves of all buckets by name."""
    found: dict[str, list[Leaf]] = {}
    for leaves in buckets:
        for name, leaf in leaves.items():
            found.setdefault(name, []).append(leaf)
    return found


def dump(leaves: Leaves) -> Saved:
    """A copy by leaf and parameter."""
    return {
        name: {parameter: part.detach().clone() for leaf in each for parameter, part in leaf.parts()}
        for name, each in leaves.items()
    }


@torch.no_grad()
def load(leaves: Leaves, saved: Sequence[Saved], rank: int, world_size: int) -> None:
    """Overwrite the leaves with what all workers saved, in order of rank; their number may have been
    another."""
    for name, each in leaves.items():
        for leaf in each:
            for parameter, part in leaf.parts():
                mine = _share(name, parameter, leaf.on_resize, saved, rank, world_size)
                if mine is None:
                    continue
                if mine.shape != part.shape:
                    raise DataError(
                        f"{name} of {parameter} does not fit: saved {tuple(mine.shape)}, "
                        f"this run has {tuple(part.shape)}"
                    )
                part.copy_(mine)


def _share(
    name: str, parameter: str, rule: OnResize, saved: Sequence[Saved], rank: int, world_size: int
) -> Tensor | None:
    """This worker's part of one saved tensor; None: it stays as it was made."""
    found = [each.get(name, {}).get(parameter) for each in saved]
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
