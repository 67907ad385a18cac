"""The plain rest of a strategy's state: saved, loaded, taken over."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from thinwire.engine import state
from thinwire.errors import DataError
from thinwire.strategies.base import SAME


@dataclass
class Plain:
    """A state with everything that belongs to no parameter."""

    leaf: Tensor
    kept: Tensor
    numbers: list[int]
    by_name: dict[str, float]
    rate: float = field(default=0.0, metadata=SAME)
    shared: Tensor = field(default_factory=lambda: torch.zeros(2), metadata=SAME)
    runtime: object = field(init=False, repr=False)


def plain(value: float) -> Plain:
    return Plain(
        torch.full((3,), value),
        torch.full((2,), value),
        [int(value)] * 2,
        {"a": value},
        value,
        torch.full((2,), value),
    )


def test_plain_state_goes_on_where_it_was_saved() -> None:
    saved, here = plain(1.0), plain(2.0)
    dumped = state.dump(saved, {id(saved.leaf)})
    assert "runtime" not in dumped
    loaded = state.load(here, dumped)
    assert loaded is here
    assert here.leaf.tolist() == [2.0] * 3, "leaves are saved by parameter"
    assert (here.kept.tolist(), here.numbers, here.by_name, here.rate) == ([1.0] * 2, [1, 1], {"a": 1.0}, 1.0)


def test_another_number_of_workers_takes_over_what_is_the_same_on_all() -> None:
    saved, here = plain(1.0), plain(2.0)
    state.load_fields(here, state.dump(saved, {id(saved.leaf)}), "same")
    assert (here.rate, here.shared.tolist()) == (1.0, [1.0, 1.0])
    assert (here.kept.tolist(), here.numbers, here.by_name) == ([2.0] * 2, [2, 2], {"a": 2.0})
    state.load_fields(None, None, "same")


def test_plain_state_that_does_not_fit_is_refused_by_place() -> None:
    dumped = state.dump(plain(1.0), set())
    with pytest.raises(DataError, match=r"state.kept does not fit: saved \(3,\), this run has \(2,\)"):
        state.load(plain(2.0), {**dumped, "kept": torch.zeros(3)})
    with pytest.raises(DataError, match=r"state.numbers does not fit: saved 3 entries, this run has 2"):
        state.load(plain(2.0), {**dumped, "numbers": [1, 2, 3]})
    with pytest.raises(TypeError, match="holds a Linear, which cannot be saved"):
        state.dump({"a": [nn.Linear(1, 1)]}, set())
