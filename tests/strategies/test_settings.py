"""Odd settings of any strategy are accepted or refused in words, never with an error of Python's own."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import thinwire as tw
from thinwire.errors import SettingError
from thinwire.strategies import registry

ODD: list[Any] = [None, True, False, 0, 1, -1, 2**70, 0.5, -0.5, 1e30, math.nan, math.inf, -math.inf, 1j]
ODD += ["", "auto", "0.1", "none", "fp32", b"fp32", [], [1], (), {}, {"a": 1}, set(), object(), int, len]
ODD += [np.float32(0.5), np.int64(3), np.ones(2), torch.tensor(0.5), torch.ones(2)]
CASES = [
    (cls, field.name)
    for cls in map(registry.load, registry.names())
    for field in fields(cls)  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("cls", "name"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_odd_settings_are_refused_in_words(cls: Any, name: str) -> None:
    for value in ODD:
        try:
            cls(**{name: value})
        except SettingError as error:
            assert f"{cls.__name__}.{name} must be" in error.message  # noqa: PT017  # most are refused, not all


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tw.TopK(density="0.1"), r"TopK\.density must be a number, got '0\.1'"),  # type: ignore[arg-type]
        (lambda: tw.TopK(warmup_steps=1e3), r"TopK\.warmup_steps must be a whole number, got 1000\.0"),  # type: ignore[arg-type]
        (lambda: tw.TopK(warmup_steps=True), r"TopK\.warmup_steps must be a whole number, got True"),
        (lambda: tw.TopK(exact=1), r"TopK\.exact must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: tw.TopK(clip_norm="1"), r"TopK\.clip_norm must be a number or None, got '1'"),  # type: ignore[arg-type]
        (lambda: tw.GossipGraD(share=[1]), r"GossipGraD\.share must be a number or one of 'auto', got \[1\]"),  # type: ignore[arg-type]
    ],
)
def test_the_rule_is_that_of_the_field(make: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    assert tw.TopK(density=np.float64(0.5), warmup_steps=np.int64(3)).density == 0.5  # type: ignore[arg-type]
