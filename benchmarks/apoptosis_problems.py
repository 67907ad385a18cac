"""The problems of `benchmarks.apoptosis`: data, network, optimizer and metric of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from thinwire.data import load_cifar, load_higgs, load_mnist
from thinwire.recipes import networks, samples
from thinwire.recipes.base import Data


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for given, made in pairwise(widths[:-1]):
        layers += [nn.Linear(given, made), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-2], widths[-1]))


def auc(scores: Tensor, targets: Tensor) -> float:
    """The share of pairs, one of each class, that the scores put in the right order."""
    order = scores.flatten().double().argsort()
    ranks = torch.empty(len(order), dtype=torch.float64, device=scores.device)
    ranks[order] = torch.arange(1, len(order) + 1, dtype=torch.float64, device=scores.device)
    positive = targets.bool()
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(order) - count)))


def accuracy(scores: Tensor, targets: Tensor) -> float:
    return float((scores.argmax(1) == targets).double().mean())


def binary_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores.flatten(), targets.to(scores.dtype))


@dataclass(frozen=True, kw_only=True)
class Problem:
    data: Callable[[Path], Data]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    epochs: int
    batch: int
    held_out: int
    """Training samples that are kept for validation."""
    lasso: float
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    metric: Callable[[Tensor, Tensor], float] = accuracy
    by_epoch: bool = False
    """Samples are chosen and augmented for a whole epoch at once, on the device: done in every step, a GPU
    would wait for the processor's random numbers."""


PROBLEMS = {
    "higgs-mlp": Problem(
        data=lambda folder: samples.as_tensors(load_higgs(folder)),
        model=lambda: mlp(28, 300, 300, 300, 1),
        optimizer=lambda m: AdamW(m.parameters(), lr=1e-3, weight_decay=0.01, fused=True),
        epochs=12,
        batch=64,
        held_out=2500,
        lasso=0.02,
        loss=binary_loss,
        metric=auc,
    ),
    "mnist-mlp": Problem(
        data=lambda folder: samples.grey_images(load_mnist(folder), highest=255),
        model=lambda: mlp(784, 1024, 1024, 10),
        optimizer=lambda m: AdamW(m.parameters(), lr=1e-3, weight_decay=0.01, fused=True),
        epochs=8,
        batch=128,
        held_out=10000,
        lasso=0.02,
    ),
    "mnist-cnn": Problem(
        data=lambda folder: samples.grey_images(load_mnist(folder), highest=255),
        model=lambda: networks.small_cnn(side=28, num_pools=2, num_hidden=64),
        optimizer=lambda m: AdamW(m.parameters(), lr=3e-3, weight_decay=0.01, fused=True),
        epochs=3,
        batch=64,
        held_out=10000,
        lasso=0.02,
    ),
    "cifar-vgg16": Problem(
        data=lambda folder: samples.colour_images(load_cifar(folder)),
        model=networks.vgg16,
        optimizer=lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True),
        epochs=16,
        batch=128,
        held_out=5000,
        lasso=0.002,
        by_epoch=True,
    ),
}
