"""What a loader returns: inputs and targets as NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import DataError


@dataclass(frozen=True, slots=True)
class Arrays:
    """Samples in memory: `inputs[i]` belongs to `targets[i]`."""

    inputs: NDArray[np.uint8] | NDArray[np.float32]
    targets: NDArray[np.int64]

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{len(self.inputs):,} inputs but {len(self.targets):,} targets")

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class TrainTest:
    """A data set with its fixed split."""

    train: Arrays
    test: Arrays
