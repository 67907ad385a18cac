"""Recipes that no strategy was tuned for: a net with batch norm, and a transformer that reads characters.

PYTHONPATH=. thinwire simulate benchmarks.held_out_recipes:text_muon --data DIR --workers 4 --strategy trickle
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from thinwire.data import load_cifar, load_tokens
from thinwire.data.files import Arrays, Tokens, TrainTest
from thinwire.recipes import samples
from thinwire.recipes.base import Data, Recipe, Training, TrainingPlan
from thinwire.recipes.catalog import cifar_resnet20, text_transformer
from thinwire.recipes.networks import TransformerBlock
from thinwire.recipes.trainings import classifier, language_model, nesterov_sgd

NUM_IMAGES = 8_000
"""Training images, the first ones; all test images."""
LENGTH, WIDTH, BLOCKS = 32, 48, 2
NUM_CHARACTERS = (200_000, 40_000)
"""Of the training and the test text."""
ALPHABET = 64
"""More than there are characters."""


def cnn() -> Recipe:
    """A convolution net with batch norm on part of CIFAR-10, with SGD."""
    training = partial(classifier, data=_images, model=_net, optimizer=partial(nesterov_sgd, rate_at_128=0.1))
    return replace(cifar_resnet20(), name="held-out-cnn", training=training, epochs=8, batch_size=16)


def text_adamw() -> Recipe:
    """A small transformer that reads characters, with AdamW."""
    return _text("adamw", lambda model, plan: AdamW(model.parameters(), lr=0.004, weight_decay=0.01))


def text_adamw_high() -> Recipe:
    """The same with four times the rate, so that a longer step may be too long."""
    return _text("adamw-high", lambda model, plan: AdamW(model.parameters(), lr=0.016, weight_decay=0.01))


def text_muon() -> Recipe:
    """The same transformer with Muon."""
    return _text("muon", lambda model, plan: Muon(model.parameters(), lr=0.02))


def _text(name: str, optimizer: Callable[[nn.Module, TrainingPlan], Optimizer]) -> Recipe:
    def training() -> Training:
        return language_model(data=_characters, model=CharacterTransformer, optimizer=optimizer)

    return replace(
        text_transformer(), name=f"held-out-text-{name}", training=training, epochs=4, batch_size=8
    )


def _images(folder: Path | None) -> Data:
    whole = load_cifar(folder)
    first = Arrays(whole.train.inputs[:NUM_IMAGES], whole.train.targets[:NUM_IMAGES])
    return samples.colour_images(TrainTest(first, whole.test))


def _net() -> nn.Module:
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise((3, 16, 32, 48)):
        layers += [nn.Conv2d(num_in, num_out, 3, padding=1, stride=2), nn.BatchNorm2d(num_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48 * 16, 10))


def _characters(folder: Path | None) -> Data:
    words = load_tokens(folder)
    texts = [
        " ".join(words.words[token] for token in part[:count])[:count]
        for part, count in zip((words.train, words.test), NUM_CHARACTERS, strict=True)
    ]
    alphabet = sorted(set("".join(texts)))
    places = {character: place for place, character in enumerate(alphabet)}

    def numbers(text: str) -> NDArray[np.int64]:
        return np.array([places[character] for character in text], dtype=np.int64)

    tokens = Tokens(numbers(texts[0]), numbers(texts[1]), tuple(alphabet))
    return samples.text_pieces(tokens, length=LENGTH, order="shuffled")


class CharacterTransformer(nn.Module):
    """Two blocks of width 48, 65 thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(
            *(TransformerBlock(width=WIDTH, num_heads=4, dropout=0.0) for _ in range(BLOCKS))
        )
        self.output = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next character at each place."""
        scores: Tensor = self.output(self.blocks(self.embedding(tokens) + self.places[: tokens.shape[1]]))
        return scores


class Muon(Optimizer):
    """Steps of matrices are their momentum with all singular values near 1; other parameters make Adam's.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, self.state[parameter], group)

    def _step(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(count=0, momentum_buffer=torch.zeros_like(grad), square=torch.zeros_like(grad))
        state["count"] += 1
        if parameter.ndim == 2 and ALPHABET not in parameter.shape:
            state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
            step = orthogonal(grad.lerp(state["momentum_buffer"], group["momentum"]))
            parameter.sub_(step, alpha=group["lr"] * max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5)
            return
        state["momentum_buffer"].lerp_(grad, 0.1)
        state["square"].lerp_(grad.square(), 0.05)
        mean = state["momentum_buffer"] / (1 - 0.9 ** state["count"])
        size = (state["square"] / (1 - 0.95 ** state["count"])).sqrt_().add_(1e-8)
        parameter.sub_(mean / size, alpha=0.2 * group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest matrix with orthogonal rows or columns."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    found: Tensor = x.T if tall else x
    return found
