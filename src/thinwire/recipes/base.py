"""What a recipe is: a named value that holds all of a training but the strategy and the workers.

Listing recipes needs no torch: what does is behind `Recipe.training`. A new recipe can start from another:
`dataclasses.replace(digits_cnn(), name="digits-long", epochs=100)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class Samples(Protocol):
    """Data to train or test with: samples that are asked for by their indices."""

    def __len__(self) -> int: ...

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one batch."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """What a recipe trains on, and what it is judged by."""

    train: Samples
    test: Samples
    order: Literal["shuffled", "streams"] = "shuffled"
    """Samples are drawn in another order each epoch, or each row of a batch goes on where the same row of the
    batch before ended (see `Shards` and `Streams`)."""


Carried = tuple["Tensor", ...] | None
"""What a model hands on from one batch to the next, as a recurrent network does; None at the start."""


def no_carry(model: nn.Module, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    """The forward pass of a model for which every batch stands alone."""
    return model(inputs), None


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What a good run reaches on the test data."""

    metric: str
    value: float
    higher_is_better: bool = True

    def reached_by(self, value: float) -> bool:
        """Whether `value` is as good as the target."""
        return value >= self.value if self.higher_is_better else value <= self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How much training there will be; what learning rates and schedules are derived from."""

    world_size: int
    batch_size: int
    """Of one worker."""
    num_steps: int

    @property
    def global_batch_size(self) -> int:
        """Samples that all workers together use in one step."""
        return self.world_size * self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The parts that need torch, as functions; the loop in `train.py` puts them together."""

    data: Callable[[Path | None], Data]
    """Loads the data, from the folder named with --data if it is not part of the package."""
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, Plan], Optimizer]
    schedule: Callable[[Optimizer, Plan], LRScheduler]
    """Of the learning rate; stepped after every optimizer step."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean over the batch, from outputs and targets."""
    score: Callable[[Tensor, Tensor], Tensor]
    """What the target's metric is the mean of: summed over the batch, from outputs and targets."""
    metric: Callable[[float], float] = float
    """The target's metric, from that mean; exp for a perplexity."""
    forward: Callable[[nn.Module, Tensor, Carried], tuple[Tensor, Carried]] = no_carry
    """Outputs for the inputs and what the last batch has carried over, and what to carry on."""
    clip_norm: float | None = None
    """The norm that gradients of all parameters together are cut down to, if at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A complete training. Same seed, same data, same number of workers: same result."""

    name: str
    summary: str
    """One line for `thinwire recipes`."""
    training: Callable[[], Training]
    """Called on the workers only; the place to import torch."""
    target: Target
    epochs: int
    """Unless --epochs says otherwise."""
    batch_size: int
    """Of one worker, unless --batch-size says otherwise."""
    locate: Callable[[Path | None], object] | None = None
    """Cheap check that the data is there, made before workers are started; raises DataError."""
