"""What the small image recipes share: grey images as samples, and a small CNN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire.data import Arrays, TrainTest
from thinwire.recipes.base import Data


@dataclass(frozen=True, slots=True)
class GreyImages:
    """Images kept as bytes (a quarter of the memory) and scaled to 0..1 as they are taken."""

    inputs: Tensor
    targets: Tensor
    highest: int

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """A batch of shape (samples, 1, height, width), and its classes."""
        where = torch.from_numpy(indices).to(self.inputs.device)
        return self.inputs[where].unsqueeze(1).float().div_(self.highest), self.targets[where]


def grey_images(arrays: TrainTest, highest: int) -> Data:
    """Both parts of a data set whose pixels go from 0 to `highest`."""

    def samples(part: Arrays) -> GreyImages:
        # arrays read from files are read-only, which tensors cannot be
        return GreyImages(torch.tensor(part.inputs), torch.tensor(part.targets), highest)

    return Data(samples(arrays.train), samples(arrays.test))


def small_cnn(*, side: int, num_pools: int, num_hidden: int) -> nn.Module:
    """A few convolutions and two dense layers, for grey images of `side` x `side` pixels, ten classes.

    Group norm, not batch norm: what a sample gives then depends on no other sample, so cutting a batch in
    parts for several workers changes nothing.
    """
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()]
    if num_pools > 1:
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)]
    num_features = 32 * (side >> num_pools) ** 2
    layers += [nn.Dropout(0.25), nn.Flatten(), nn.Linear(num_features, num_hidden), nn.ReLU()]
    layers += [nn.Dropout(0.25), nn.Linear(num_hidden, 10)]
    return nn.Sequential(*layers)
