"""Recipes whose samples lie sorted by class, so that with `--shuffle own` each worker has a class or two.

PYTHONPATH=. thinwire train benchmarks.sorted_recipes:mnist --data DIR --workers 8 --shuffle ring
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from thinwire.recipes.base import Data, Recipe, Training
from thinwire.recipes.catalog import digits_cnn, mnist_cnn


def digits() -> Recipe:
    return sorted_by_class(digits_cnn())


def mnist() -> Recipe:
    return sorted_by_class(mnist_cnn())


def sorted_by_class(recipe: Recipe) -> Recipe:
    """The recipe with its training samples in the order of their targets."""

    def training() -> Training:
        from thinwire.recipes.setup import sample_tensors

        usual = recipe.training()

        def data(folder: Path | None) -> Data:
            whole = usual.data(folder)
            tensors, samples = sample_tensors(whole.train), whole.train
            order = tensors["targets"].argsort(stable=True)
            ordered: Any = replace(samples, **{name: tensor[order] for name, tensor in tensors.items()})  # type: ignore[type-var]
            return replace(whole, train=ordered)

        return replace(usual, data=data)

    return replace(recipe, name=f"{recipe.name}-sorted", training=training)
