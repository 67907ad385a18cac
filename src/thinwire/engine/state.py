"""A strategy's state in checkpoints: flat tensors by parameter, and the plain rest.

A leaf belongs to a bucket and holds one number for each of its parameters' numbers (or only for the large
parameters'). It is saved by parameter name, so that it can be carried over to other buckets, to another
number of workers by the rule given where it was made, and to parameters that have shrunk. Plain are numbers,
lists and tensors that belong to no parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.errors import DataError
from thinwire.strategies.base import ON_RESIZE, OnResize

if TYPE_CHECKING:
    from thinwire.engine.buckets import ParameterBucket
    from thinwire.strategies.base import Strategy

Saved = dict[str, dict[str, Tensor]]
"""By leaf, then by parameter."""
Kept = Mapping[str, Sequence[Tensor | None]]
"""By parameter: for each of its dimensions the indices that are left, None if all are."""


@dataclasses.dataclass(slots=True)
class Leaf:
    """One flat tensor of a bucket."""

    data: Tensor
    on_resize: OnResize
    names: Sequence[str]
    """Of the parameters it covers, in the order they lie in it."""
    shapes: Sequence[torch.Size]
    of_parameters: bool = False
    """Whether it holds values of parameters."""
    changed: bool = dataclasses.field(default=False, init=False)
    """Whether a pass may have changed it that no step has used yet."""
    _before: Tensor | None = dataclasses.field(default=None, init=False)

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
        views = self.data.split([shape.numel() for shape in self.shapes])
        parts = zip(self.names, views, self.shapes, strict=True)
        return [(name, view.view(shape)) for name, view, shape in parts]


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


# -- all of it ------------------------------------------------------------------------------------


def dump_all(
    strategy: Strategy, steps: int, buckets: Sequence[ParameterBucket], states: Sequence[Any]
) -> dict[str, Any]:
    """What must survive a stop: leaves by parameter, and the rest of each of a strategy's states."""
    by_parameter = {id(leaf.data) for bucket in buckets for leaf in bucket.leaves.values()}
    return {
        "strategy": repr(strategy),
        "steps": steps,
        "layout": [bucket.names for bucket in buckets],
        "leaves": dump_leaves(buckets),
        "plain": [dump(state, by_parameter) for state in states],
    }


def check_strategy(saved: Sequence[Mapping[str, Any]], strategy: Strategy) -> None:
    if saved[0]["strategy"] != repr(strategy):
        raise DataError(
            f"the saved state is of {saved[0]['strategy']}, this run has {strategy!r}",
            hint="go on with the strategy the state was saved with",
        )


def load_all(
    saved: Sequence[Mapping[str, Any]],
    buckets: Sequence[ParameterBucket],
    states: Sequence[Any],
    rank: int,
    world_size: int,
) -> list[Any]:
    """Go on with this worker's share of what all workers saved, in order of rank; returns the states."""
    load_leaves(buckets, [each["leaves"] for each in saved], rank, world_size)
    furthest = max(saved, key=lambda each: int(each["steps"]))
    if furthest["layout"] != [bucket.names for bucket in buckets]:
        return list(states)  # of other buckets: what is not kept by parameter begins anew
    if len(saved) == world_size:
        return [load(state, mine) for state, mine in zip(states, saved[rank]["plain"], strict=True)]
    for state, theirs in zip(states, furthest["plain"], strict=True):
        load_fields(state, theirs, "same")
    return list(states)


# -- the plain rest -------------------------------------------------------------------------------


def dump(state: Any, leaves: set[int]) -> Any:
    """A copy of `state` that can be saved; None in the place of `leaves`, which are saved by parameter."""
    if isinstance(state, Tensor):
        return None if id(state) in leaves else state.detach().clone()
    if dataclasses.is_dataclass(state):
        fields = [field for field in dataclasses.fields(state) if field.init or field.repr]
        return {field.name: dump(getattr(state, field.name), leaves) for field in fields}
    if isinstance(state, dict):
        return {key: dump(value, leaves) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [dump(value, leaves) for value in state]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise TypeError(f"a strategy's state holds a {type(state).__name__}, which cannot be saved")


def load(state: Any, saved: Any, where: str = "state") -> Any:
    """`state` with the saved values: tensors are overwritten in place, numbers are returned."""
    if isinstance(state, Tensor):
        if saved is None:
            return state  # a leaf
        if not isinstance(saved, Tensor) or saved.shape != state.shape:
            shape = tuple(saved.shape) if isinstance(saved, Tensor) else type(saved).__name__
            raise DataError(f"{where} does not fit: saved {shape}, this run has {tuple(state.shape)}")
        return state.copy_(saved)
    if dataclasses.is_dataclass(state):
        for name, value in saved.items():
            setattr(state, name, load(getattr(state, name), value, f"{where}.{name}"))
        return state
    if isinstance(state, dict):
        state.update({key: load(state[key], value, f"{where}.{key}") for key, value in saved.items()})
        return state
    if isinstance(state, list):
        if len(state) != len(saved):
            raise DataError(f"{where} does not fit: saved {len(saved)} entries, this run has {len(state)}")
        pairs = enumerate(zip(state, saved, strict=True))
        state[:] = [load(old, new, f"{where}[{i}]") for i, (old, new) in pairs]
        return state
    return saved


def load_fields(state: Any, saved: Any, rule: str) -> None:
    """Only the fields with this rule for another number of workers; the others stay as they were made."""
    if not dataclasses.is_dataclass(state):
        return
    for field in dataclasses.fields(state):
        if field.metadata.get(ON_RESIZE) == rule:
            value = saved[field.name]
            # what a worker takes along may have the size of the old world
            fits = rule != "own"
            setattr(state, field.name, load(getattr(state, field.name), value, field.name) if fits else value)
