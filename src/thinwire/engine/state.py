"""A strategy's state as plain tensors, numbers, lists and dicts: out, and back in place."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from thinwire.errors import DataError


def dump(state: Any) -> Any:
    """A copy of `state` that can be saved; wires and lanes are left out."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if dataclasses.is_dataclass(state):
        return {f.name: dump(getattr(state, f.name)) for f in dataclasses.fields(state) if f.init or f.repr}
    if isinstance(state, dict):
        return {key: dump(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [dump(value) for value in state]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise TypeError(f"a strategy's state holds a {type(state).__name__}, which cannot be saved")


def load(state: Any, saved: Any, where: str = "state") -> Any:
    """`state` with the saved values: tensors are overwritten in place, numbers are returned."""
    if isinstance(state, Tensor):
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
