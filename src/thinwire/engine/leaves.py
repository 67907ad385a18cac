"""Leaves: flat tensors of a strategy's state with one number for each number of a bucket's parameters.

Some cover the large parameters only. A leaf is saved by parameter name. So it can be carried over to other
buckets, to another number of workers by the rule given where it was made, and to parameters that have shrunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.engine.span import views
from thinwire.errors import DataError
from thinwire.strategies.base import OnResize

if TYPE_CHECKING:
    from thinwire.engine.buckets import ParameterBucket

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
    """The parameters it covers, in the order they lie in it."""
    shapes: Sequence[torch.Size]
    of_parameters: bool = False
    """Whether it holds values of parameters."""
    changed: bool = field(default=False, init=False)
    """Whether a pass may have changed it that no step has used yet."""
    _before: Tensor | None = field(default=None, init=False)

    def remember_(self) -> None:
        """Keep a copy, in case no step uses what a pass makes of it."""
        if self._before is None:
            self._before = torch.empty_like(self.data)
        self._before.copy_(self.data)
        self.changed = True

    def undo_(self) -> None:
        """Go back to the copy."""
        if self._before is not None and self.changed:
            self.data.copy_(self._before)

    def parts(self) -> list[tuple[str, Tensor]]:
        """Views of the data, by parameter."""
        return list(zip(self.names, views(self.data, self.shapes), strict=True))


def dump_leaves(buckets: Iterable[ParameterBucket]) -> Saved:
    """A copy of all leaves."""
    found: Saved = {}
    for bucket in buckets:
        for name, leaf in bucket.leaves.items():
            found.setdefault(name, {}).update((key, part.detach().clone()) for key, part in leaf.parts())
    return found


@torch.no_grad()
def load_leaves(
    buckets: Iterable[ParameterBucket], saved: Sequence[Saved], rank: int, world_size: int
) -> None:
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


@torch.no_grad()
def load_common(
    buckets: Iterable[ParameterBucket], saved: Saved, rules: Sequence[OnResize] = ("same", "mean")
) -> None:
    """Overwrite the leaves that all workers have in common, or nearly, with those of one of them."""
    for bucket in buckets:
        for name, leaf in bucket.leaves.items():
            if leaf.on_resize in rules:
                for parameter, part in leaf.parts():
                    if (theirs := saved.get(name, {}).get(parameter)) is not None:
                        part.copy_(theirs)


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
