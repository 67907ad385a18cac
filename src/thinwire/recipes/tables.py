"""What recipes on tables need: rows of numbers as samples, and a dense network."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire.data import Arrays, TrainTest
from thinwire.recipes.base import Data


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of features, and their classes."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """A batch of shape (samples, features), and its classes."""
        where = torch.from_numpy(indices).to(self.inputs.device)
        return self.inputs[where], self.targets[where]


def rows(arrays: TrainTest) -> Data:
    """Both parts of a data set as they are."""

    def samples(part: Arrays) -> Rows:
        return Rows(torch.tensor(part.inputs), torch.tensor(part.targets))

    return Data(samples(arrays.train), samples(arrays.test))


def mlp() -> nn.Module:
    """Three hidden layers of 256 for 28 features and two classes."""
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise((28, 256, 256, 256)):
        layers += [nn.Linear(num_in, num_out), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(256, 2))
