"""A stand-in for torchvision: the parts that common scripts use, with small data that can be learned.

Images are tensors from the beginning, so transforms take and return tensors. Every data set is made from a
fixed seed: one smooth picture per class and noise on top. Nothing is read, written or downloaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

TRAIN_SIZE, TEST_SIZE = 256, 64
NUM_CLASSES = 10
MOST_NUMBERS = 1 << 23
"""In a data set: the pictures of ImageNet are large."""

Transform = Callable[[Any], Any]


# -- data sets -----------------------------------------------------------------------------------------------


class Pictures(torch.utils.data.Dataset[tuple[Any, int]]):
    """Noisy copies of one picture per class, between 0 and 1."""

    def __init__(self, size: int, shape: Sequence[int], transform: Transform | None, *, seed: int) -> None:
        coarse = torch.rand(NUM_CLASSES, shape[0], 4, 4, generator=torch.Generator().manual_seed(0))
        classes = functional.interpolate(coarse, size=tuple(shape[1:]), mode="bilinear")
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.arange(size) % NUM_CLASSES
        noise = torch.randn(size, *shape, generator=generator)
        self.data = (classes[self.targets] + 0.2 * noise).clamp(0, 1)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture: Any = self.data[index]
        return (self.transform(picture) if self.transform else picture), int(self.targets[index])


def _data_set(*shape: int) -> Callable[..., Pictures]:
    def make(
        root: str = "", train: bool = True, transform: Transform | None = None, download: bool = False
    ) -> Pictures:
        return Pictures(TRAIN_SIZE if train else TEST_SIZE, shape, transform, seed=1 + train)

    return make


def fake_data(
    size: int = TRAIN_SIZE,
    image_size: Sequence[int] = (3, 224, 224),
    num_classes: int = NUM_CLASSES,
    transform: Transform | None = None,
) -> Pictures:
    most = MOST_NUMBERS // math.prod(image_size)
    return Pictures(min(size, TRAIN_SIZE, most), image_size, transform, seed=1)


# -- transforms ----------------------------------------------------------------------------------------------


class Compose:
    def __init__(self, transforms: Sequence[Transform]) -> None:
        self.transforms = transforms

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


def normalize(mean: Sequence[float], std: Sequence[float]) -> Transform:
    return lambda picture: (picture - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)


def resize(size: int) -> Transform:
    return lambda picture: functional.interpolate(picture[None], size=(size, size), mode="bilinear")[0]


def pad(padding: int) -> Transform:
    return lambda picture: functional.pad(picture, [padding] * 4)


def random_horizontal_flip(probability: float = 0.5) -> Transform:
    return lambda picture: picture.flip(-1) if torch.rand(()) < probability else picture


def random_crop(size: int, padding: int = 0) -> Transform:
    def crop(picture: Tensor) -> Tensor:
        padded = functional.pad(picture, [padding] * 4)
        top, left = (int(torch.randint(side - size + 1, ())) for side in padded.shape[-2:])
        return padded[..., top : top + size, left : left + size]

    return crop


def _same(*_: Any) -> Transform:
    return lambda picture: picture


# -- models --------------------------------------------------------------------------------------------------


class SmallNet(nn.Module):
    """In place of the nets of ImageNet: convolutions, batch normalization and a classifier, in miniature."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 7, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2),
            nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        )  # fmt: skip
        self.fc = nn.Linear(256, num_classes)

    def forward(self, pictures: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.features(pictures))
        return scores


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def install() -> None:
    """From now on, `import torchvision` in this process gives the stand-in."""
    datasets = _module(
        "torchvision.datasets", MNIST=_data_set(1, 28, 28), CIFAR10=_data_set(3, 32, 32), FakeData=fake_data
    )
    transforms = _module(
        "torchvision.transforms",
        Compose=Compose,
        ToTensor=_same,
        Normalize=normalize,
        Resize=resize,
        CenterCrop=_same,
        Pad=pad,
        RandomCrop=random_crop,
        RandomHorizontalFlip=random_horizontal_flip,
    )
    models = _module("torchvision.models", resnet18=SmallNet)
    utils = _module("torchvision.utils", save_image=lambda *_, **__: None)
    parts = {"datasets": datasets, "transforms": transforms, "models": models, "utils": utils}
    sys.modules["torchvision"] = _module("torchvision", **parts)
    for name, part in parts.items():
        sys.modules[f"torchvision.{name}"] = part
