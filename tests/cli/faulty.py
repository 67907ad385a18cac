"""Recipes that go wrong on purpose, for the tests: small and quick until then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from thinwire.recipes.base import Recipe, Training
from thinwire.recipes.catalog import digits_cnn

FAULTY_RANK = "1"
FAULTY_CALL = 20


def nan_loss() -> Recipe:
    """The loss of one worker turns into NaN."""
    return _with_loss(lambda loss: loss * float("nan"))


def crash() -> Recipe:
    """One worker has a bug."""

    def fall(loss: Tensor) -> Tensor:
        raise ZeroDivisionError("a bug of the user's")

    return _with_loss(fall)


def endless() -> Recipe:
    """Trains until somebody ends it."""
    recipe = _with_loss(lambda loss: loss, step_s=0.02)
    return replace(recipe, epochs=1_000_000)


def until_told() -> Recipe:
    """Slow until the file that THINWIRE_TEST_GO names is there."""
    recipe = digits_cnn()

    def training() -> Training:
        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            time.sleep(0.0 if os.path.exists(os.environ["THINWIRE_TEST_GO"]) else 0.2)
            return torch.nn.functional.cross_entropy(outputs, targets)

        return replace(recipe.training(), loss=loss)

    return replace(recipe, training=training, epochs=8)


def _with_loss(fault: Callable[[Tensor], Tensor], *, step_s: float = 0.0) -> Recipe:
    recipe = digits_cnn()

    def training() -> Training:
        usual = recipe.training()
        calls = 0

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            time.sleep(step_s)
            value = torch.nn.functional.cross_entropy(outputs, targets)
            return fault(value) if os.environ["RANK"] == FAULTY_RANK and calls >= FAULTY_CALL else value

        return replace(usual, loss=loss, model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))

    return replace(recipe, training=training)
