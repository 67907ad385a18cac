"""The plain part of a strategy's state: numbers, lists and tensors that belong to no parameter."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from thinwire.errors import DataError
from thinwire.strategies.base import ON_RESIZE


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
        state.copy_(saved)
        return state
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
        state[:] = [
            load(old, new, f"{where}[{i}]") for i, (old, new) in enumerate(zip(state, saved, strict=True))
        ]
        return state
    return saved


def load_same(state: Any, saved: Any) -> None:
    """Only the fields that outlive another number of workers; the others stay as they were made."""
    if not dataclasses.is_dataclass(state):
        return
    for field in dataclasses.fields(state):
        if field.metadata.get(ON_RESIZE) == "same":
            setattr(state, field.name, load(getattr(state, field.name), saved[field.name], field.name))
