"""A recipe is a named value that holds all of a training but the strategy and the workers.

Listing recipes needs no torch: the parts that need it are behind `Recipe.training`. A new recipe can start
from another: `dataclasses.replace(digits_cnn(), name="digits-long", epochs=100)`.
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
    """Training or test data: `take` returns the inputs and targets of one batch, given by indices."""

    def __len__(self) -> int: ...
    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Data:
    """The training and test samples of a recipe."""

    train: Samples
    test: Samples
    order: Literal["shuffled", "streams"] = "shuffled"
    """Samples are drawn in another order each epoch, or each row of a batch continues where the same row of
    the batch before ended (see `Shards` and `Streams`)."""


Carried = tuple["Tensor", ...] | None
"""State that a model hands on from one batch to the next, as a recurrent network does; None at the start."""


def no_carry(model: nn.Module, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    """Run a model for which every batch stands alone."""
    return model(inputs), None


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricTarget:
    """The test metric that a good run reaches."""

    metric: str
    value: float
    higher_is_better: bool = True

    def reached_by(self, value: float) -> bool:
        return value >= self.value if self.higher_is_better else value <= self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """How much training there will be; learning rates and schedules are derived from it."""

    world_size: int
    batch_size: int
    """Samples per worker and step."""
    num_steps: int

    @property
    def global_batch_size(self) -> int:
        """Samples that all workers together use in one step."""
        return self.world_size * self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The parts that need torch, as functions."""

    data: Callable[[Path | None], Data]
    """Loads the data, from the folder named with --data if it is not part of the package."""
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module, TrainingPlan], Optimizer]
    schedule: Callable[[Optimizer, TrainingPlan], LRScheduler]
    """Makes the learning-rate schedule, which is stepped after every optimizer step."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of a batch, from outputs and targets."""
    score: Callable[[Tensor, Tensor], Tensor]
    """Summed score of a batch, from outputs and targets; the target's metric follows from its mean."""
    metric: Callable[[float], float] = float
    """The target's metric, from that mean; exp for a perplexity."""
    forward: Callable[[nn.Module, Tensor, Carried], tuple[Tensor, Carried]] = no_carry
    """Outputs, and the state to carry on, from the inputs and the state carried over from the last batch."""
    clip_norm: float | None = None
    """The norm that the gradients of all parameters together are clipped to; None: no clipping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A complete training. Same seed, same data, same number of workers: same result."""

    name: str
    summary: str
    """One line for `thinwire recipes`."""
    training: Callable[[], Training]
    """Called on the workers only; the place to import torch."""
    target: MetricTarget
    epochs: int
    """Used unless --epochs says otherwise."""
    batch_size: int
    """Samples per worker and step, unless --batch-size says otherwise."""
    locate: Callable[[Path | None], object] | None = None
    """Cheap check of the folder named with --data, made before workers are started: raises DataError if the
    data is not there, SettingError if the recipe needs no folder. None: any folder, or none, is passed on."""
