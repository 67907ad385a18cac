"""A convolution net on part of CIFAR-10, trained with SGD: the task of `sasgd_claim`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn
from torch.optim import SGD

from thinwire.data import load_cifar
from thinwire.data.files import Arrays, TrainTest
from thinwire.recipes import registry, samples
from thinwire.recipes.base import Data, Recipe, Training, TrainingPlan
from thinwire.recipes.trainings import classifier

NUM_IMAGES = 12_000
"""Training images, the first ones; the test images are all 10,000."""


def convolution_net() -> nn.Module:
    """Three convolutions and a dense layer: 35 k parameters, no normalisation, quick on one core."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 5, padding=2, stride=2), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    )


def part_of_cifar(folder: Path | None) -> Data:
    whole = load_cifar(folder)
    first = Arrays(whole.train.inputs[:NUM_IMAGES], whole.train.targets[:NUM_IMAGES])
    return samples.colour_images(TrainTest(first, whole.test))


def with_sgd(rate: float, momentum: float) -> Recipe:
    """The net with SGD; `rate` is the highest of the one-cycle schedule."""

    def sgd(model: nn.Module, plan: TrainingPlan) -> SGD:
        return SGD(model.parameters(), lr=rate, momentum=momentum)

    def training() -> Training:
        return classifier(data=part_of_cifar, model=convolution_net, optimizer=sgd)

    return replace(registry.get("cifar-resnet20"), name="cifar-claim", training=training)
