"""A strategy's state in checkpoints, in other worlds and for smaller parameters.

It has two parts: leaves, which belong to parameters (`leaves.py`), and the plain rest: numbers, lists and
tensors that belong to no parameter. Each group of replicas has a plain rest of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from thinwire.engine.leaves import Kept, dump_leaves, load_common, load_leaves, shrink
from thinwire.errors import DataError
from thinwire.strategies.base import ON_RESIZE, overrides

if TYPE_CHECKING:
    from thinwire.engine.buckets import ParameterBucket
    from thinwire.strategies.base import Strategy


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
    if len(states) > 1 and len(saved) != world_size and any(each["leaves"] for each in saved):
        raise DataError(
            f"the state of {len(saved)} workers with several groups cannot go on with {world_size}",
            hint="go on with as many workers as saved it",
        )
    load_leaves(buckets, [each["leaves"] for each in saved], rank, world_size)
    furthest = max(saved, key=lambda each: int(each["steps"]))
    if furthest["layout"] != [bucket.names for bucket in buckets]:
        return list(states)  # of other buckets: what is not kept by parameter begins anew
    if len(saved) == world_size:
        return [load(state, mine) for state, mine in zip(states, saved[rank]["plain"], strict=True)]
    for state, theirs in zip(states, furthest["plain"], strict=True):
        load_fields(state, theirs, "same")
    return list(states)


def take_over(
    strategy: Strategy,
    buckets: Sequence[ParameterBucket],
    states: Sequence[Any],
    *,
    own: Mapping[str, Any] | None,
    giver: Mapping[str, Any],
    joins: bool,
) -> None:
    """Go on in another world: with this worker's own leaves, and what all have in common from `giver`.

    Whoever joins has no leaves of its own, or must not keep those that all have in common.
    """
    if own is not None:
        load_leaves(buckets, [own["leaves"]], rank=0, world_size=1)
    if joins or not overrides(strategy, "recover"):
        load_common(buckets, giver["leaves"], ("same", "mean") if joins else ("same",))
    layout = [bucket.names for bucket in buckets]
    for rule, source in (("same", giver), ("own", None if joins else own)):
        if source is not None and source["layout"] == layout:
            for state, plain in zip(states, source["plain"], strict=True):
                load_fields(state, plain, rule)


def shrunken(
    saved: dict[str, Any],
    buckets: Sequence[ParameterBucket],
    kept: Kept,
    move: Callable[[dict[str, Tensor]], None],
) -> dict[str, Any]:
    """A saved state as it is for parameters that keep only these indices; `move` first changes the values of
    copies of parameters, given by name."""
    leaves = [each for bucket in buckets for each in bucket.leaves.items()]
    for name in {name for name, leaf in leaves if leaf.of_parameters}:
        move(saved["leaves"][name])
    # What belongs to no parameter may still have the size of one: it begins anew.
    return {**saved, "leaves": shrink(saved["leaves"], kept), "layout": []}


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
