"""Models as arrays that travel between processes as plain bytes, and how far two of them are apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
from torch import nn

Arrays = dict[str, "np.ndarray[Any, Any]"]
T = TypeVar("T")


def once(run: Callable[..., T]) -> Callable[..., T]:
    """Like functools.cache, for what many tests look at; a failure is remembered too, not tried again."""

    @functools.cache
    def outcome(*args: Hashable) -> tuple[T | None, Exception | None]:
        try:
            return run(*args), None
        except Exception as error:  # noqa: BLE001  # raised below, to everyone who asks
            return None, error

    def result(*args: Hashable) -> T:
        value, error = outcome(*args)
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # no error, hence a T

    return result


def arrays(model: nn.Module) -> Arrays:
    """Parameters and buffers; as float64, which numpy has and which holds every narrower number exactly."""
    return {name: t.detach().double().numpy().copy() for name, t in model.state_dict().items()}


def difference(ours: Arrays, theirs: Arrays) -> float:
    """The largest distance of an array, relative to its norm."""
    assert ours.keys() == theirs.keys()
    norm = np.linalg.norm
    distances = [norm(ours[n] - theirs[n]) / (norm(theirs[n]) or 1.0) for n in theirs]
    return float(np.max(distances))  # unlike max, not a number if one of them is none


def same_bits(ours: Arrays, theirs: Arrays) -> bool:
    assert ours.keys() == theirs.keys()
    return all(np.array_equal(ours[name], theirs[name]) for name in theirs)
