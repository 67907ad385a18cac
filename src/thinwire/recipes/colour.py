"""What the CIFAR recipes share: colour images, cropped and mirrored at random, and SGD with momentum."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from thinwire.data import Arrays, TrainTest
from thinwire.recipes.base import Data, Plan

_MARGIN = 4
"""Pixels that a crop may be off the centre."""
# of the pixels of CIFAR-10's training images, by colour, as shares of 255
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True, slots=True)
class ColourImages:
    """Images kept as bytes, colours last, so that cropping a whole batch is one gather."""

    inputs: Tensor
    targets: Tensor
    augment: bool
    """Whether images are moved and mirrored at random as they are taken. The numbers come from torch's own
    generator on the CPU, which the training loop seeds per worker."""

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """A batch of shape (samples, 3, height, width), normalised, and its classes."""
        where = torch.from_numpy(indices).to(self.inputs.device)
        images = self.inputs[where]
        if self.augment:
            images = crop_and_mirror(images)
        mean, deviation = _colours(images.device)
        normalised = (images.float() - mean) / deviation
        return normalised.permute(0, 3, 1, 2).contiguous(), self.targets[where]


@functools.cache
def _colours(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, deviation = (torch.tensor(values, device=device) * 255 for values in (_MEAN, _DEVIATION))
    return mean, deviation


def colour_images(arrays: TrainTest) -> Data:
    """Both parts of a data set of bytes n x height x width x 3; only the training part is augmented."""

    def samples(part: Arrays, augment: bool) -> ColourImages:
        return ColourImages(torch.tensor(part.inputs), torch.tensor(part.targets), augment)

    return Data(samples(arrays.train, augment=True), samples(arrays.test, augment=False))


def crop_and_mirror(images: Tensor) -> Tensor:
    """Each image moved by up to four pixels both ways, black coming in, and every second one mirrored."""
    count, height, width, _ = images.shape
    padded = nn.functional.pad(images, (0, 0, _MARGIN, _MARGIN, _MARGIN, _MARGIN))
    # the generator of the CPU gives the same crops on every device
    top, left = torch.randint(0, 2 * _MARGIN + 1, (2, count, 1), device="cpu")
    mirrored = torch.randint(0, 2, (count, 1), device="cpu")
    columns = torch.arange(width, device="cpu")
    rows = torch.arange(height, device="cpu") + top
    columns = torch.where(mirrored == 1, width - 1 - columns, columns) + left
    number = torch.arange(count, device=images.device).view(count, 1, 1)
    rows, columns = torch.cat((rows, columns), dim=1).to(images.device).split((height, width), dim=1)
    return padded[number, rows.view(count, height, 1), columns.view(count, 1, width)]


def sgd(model: nn.Module, plan: Plan, *, rate_at_128: float) -> Optimizer:
    """SGD with momentum whose learning rate grows with the global batch size."""
    rate = rate_at_128 * plan.global_batch_size / 128
    return SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
