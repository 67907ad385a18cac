"""The parts of a run: data and who holds which part, plan, optimizer and schedule, connected workers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.apoptosis.settings import parse as parse_apoptosis
from thinwire.data import Shards, ShuffleRing, Streams
from thinwire.engine.attach import attach
from thinwire.engine.core import Stats
from thinwire.engine.link import Link
from thinwire.errors import SettingError, UsageError
from thinwire.recipes.base import Carried, Data, Recipe, Samples, Training, TrainingPlan
from thinwire.recipes.config import RunConfig
from thinwire.strategies import registry as strategies
from thinwire.strategies.base import Strategy, overrides

_log = logging.getLogger("thinwire")


class LRSchedule:
    """An optimizer and its learning-rate schedule, both derived from the plan."""

    def __init__(self, training: Training, model: nn.Module, plan: TrainingPlan) -> None:
        self.optimizer = training.optimizer(model, plan)
        self._make = partial(training.schedule, self.optimizer, plan)
        self._settings = [{**group, "params": None} for group in self.optimizer.param_groups]
        self._schedule = self._make()

    def step(self) -> None:
        self._schedule.step()

    def follow(self, other: LRSchedule) -> None:
        """Copy the learning rates of another schedule, whose optimizer makes the steps."""
        for group, leading in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            group["lr"] = leading["lr"]  # read by strategies and checkpoints, though no step is made here

    def follow_plan(self, training: Training, model: nn.Module, plan: TrainingPlan, *, step: int) -> None:
        """Go on as a training by another plan does after `step` steps; the optimizer keeps its moments."""
        made = LRSchedule(training, model, plan)
        self._settings, self._make = made._settings, partial(training.schedule, self.optimizer, plan)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Keep the optimizer's moments, and take the settings that the plan, which may have been made for
        another number of workers than the loaded ones, has for `step`."""
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**settings, "params": parameters})
        self._schedule = self._make()
        with warnings.catch_warnings():
            # "before optimizer.step()": there were steps, in the run that was saved
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(step):
                self._schedule.step()

    def state_dict(self) -> dict[str, Any]:  # without the optimizer, which saves its own
        return self._schedule.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._schedule.load_state_dict(saved)


@dataclass(frozen=True, slots=True)
class RunSetup:
    """A recipe with its data loaded for one run."""

    recipe: Recipe
    config: RunConfig
    training: Training
    data: Data
    device: torch.device

    @classmethod
    def load(cls, recipe: Recipe, config: RunConfig, local_rank: int = 0) -> RunSetup:
        """Seed torch, choose the device and load the data onto it."""
        torch.manual_seed(config.seed)
        device = choose_device(config.device, local_rank)
        training = recipe.training()
        with device:  # the data is small: its tensors are made where they are used
            data = training.data(None if config.data is None else Path(config.data))
        return cls(recipe, config, training, data, device)

    def shards(self, rank: int, world_size: int) -> Shards | Streams:
        """Return one worker's part of the training data, in the order the data asks for."""
        count, seed = len(self.data.train), self.config.seed
        if self.data.order == "streams":
            return Streams(num_samples=count, rank=rank, world_size=world_size)
        if self.config.shuffle != "dealt":  # the worker's own part, shuffled by itself
            return Shards(num_samples=count // world_size, seed=seed)
        return Shards(num_samples=count, rank=rank, world_size=world_size, seed=seed)

    def plan(self, world_size: int) -> TrainingPlan:
        """Derive the plan; every worker has as many batches as the first."""
        batch_size = self.config.batch_size
        num_steps = self.config.epochs * self.shards(0, world_size).num_batches(batch_size)
        return TrainingPlan(world_size=world_size, batch_size=batch_size, num_steps=num_steps)

    def steps_left(self, plan: TrainingPlan, epoch: int, num_batches: int) -> int:
        """Return the steps left of a run that has `num_batches` left in `epoch` (the first is 0)."""
        epochs = self.config.epochs
        return num_batches + (epochs - 1 - epoch) * (plan.num_steps // epochs)

    def take(self, samples: Samples, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of one batch on the device."""
        inputs, targets = samples.take(indices)
        return inputs.to(self.device), targets.to(self.device)

    def loss(self, model: Any, inputs: Tensor, targets: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        """Return the loss of one batch, and the state to carry on."""
        outputs, carried = self.training.forward(model, inputs, carried)
        return self.training.loss(outputs, targets), carried

    def shuffle_ring(self, link: LinkLike) -> ShuffleRing:
        """Make the ring through which the samples of all workers travel."""
        if not isinstance(link, Link):
            raise UsageError("samples travel through a link; this run was attached by another system")
        return ShuffleRing(*sample_tensors(self.data.train).values(), link=link, seed=self.config.seed)

    def advice(self, num_steps: int, *, log: bool) -> str:
        """Return the strategy's advice on a training of `num_steps`; other systems give none."""
        config = self.config
        if config.workers == 1 or config.strategy not in strategies.names():
            return ""
        advice = strategies.build(config.strategy, config.settings).advice(num_steps, config.workers)
        if advice and log:
            _log.warning(advice)
        return advice


def own_part(data: Data, rank: int, world_size: int) -> Data:
    """Return `data` with a copy of one worker's block of the training samples, so that the rest is freed."""
    block = block_range(data, rank, world_size)
    return replace(data, train=copy_rows(data.train, slice(block.start, block.stop)))


def copy_rows(samples: Samples, rows: slice) -> Samples:
    """Return a copy of some of the samples, as the same kind of samples."""
    own = {name: tensor[rows].clone() for name, tensor in sample_tensors(samples).items()}
    copied: Samples = replace(cast("Any", samples), **own)
    return copied


def block_range(data: Data, rank: int, world_size: int) -> range:
    """Return the samples a worker holds at first: blocks in the order of the data, of nearly equal size."""
    if data.order == "streams":
        raise SettingError(
            "shuffle must be 'dealt' for a text that is read in streams: its pieces stand in order",
            hint="leave --shuffle out, or train text-transformer",
        )
    count = len(data.train)
    return range(rank * count // world_size, (rank + 1) * count // world_size)


def sample_tensors(samples: Samples) -> dict[str, Tensor]:
    """Return the tensors that hold the samples, by field name; each has one row per sample."""
    holder: Any = samples
    values = {f.name: getattr(holder, f.name) for f in fields(holder)} if is_dataclass(holder) else {}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    if not tensors or any(len(tensor) != len(samples) for tensor in tensors.values()):
        raise SettingError(
            f"shuffle must be 'dealt' for samples of type {type(samples).__name__}",
            hint="own and ring need a dataclass whose tensors have one row per sample",
        )
    return tensors


def worker_seed(seed: int, rank: int) -> int:
    """Derive a worker's own seed: workers draw different numbers (dropout, crops), every run the same."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])


def choose_device(asked: str, local_rank: int) -> torch.device:
    """Return the device for `asked` (auto, cpu, cuda); the workers of a host take its GPUs in turn."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise SettingError(
            "device must be cpu or auto on this host: torch finds no GPU",
            hint="leave --device out, or install a torch that was built for this GPU",
        )
    if asked == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # else NCCL and new streams use GPU 0 on every worker
    return device


class LinkLike(Protocol):
    """The part of a link that the training loop uses; `thinwire.Link` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def stats(self) -> Stats: ...

    def all_reduce(self, values: Sequence[float]) -> list[float]: ...
    def clip_grad_norm_(self, max_norm: float) -> Tensor: ...
    def averaged(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Attached:
    """A model and an optimizer that train together with those of the other workers."""

    model: nn.Module
    """Wrapped by some systems; calls forward through it."""
    optimizer: Optimizer
    """Wrapped by some systems."""
    link: LinkLike
    replicas_agree: bool
    """Whether all workers hold the same model; if not, the mean is evaluated."""


Attach = Callable[[nn.Module, Optimizer], AbstractContextManager[Attached]]


def talks(strategy: Strategy) -> bool:
    """Whether workers ever hear of each other's gradients or parameters."""
    return overrides(strategy, "reduce") or overrides(strategy, "mix")


@contextmanager
def attach_by(
    config: RunConfig, num_steps: int, model: nn.Module, optimizer: Optimizer
) -> Iterator[Attached]:
    """Attach with the strategy that `config` names."""
    strategy = strategies.build(config.strategy, config.settings)
    # workers that never talk are evaluated each by itself: their mean would be meaningless
    agree = strategy.replicas_agree or not talks(strategy)
    apoptosis = parse_apoptosis(config.apoptosis) if config.apoptosis else None
    with attach(
        model,
        optimizer,
        strategy,
        num_steps=max(1, num_steps),
        elastic=config.elastic,
        apoptosis=apoptosis,
    ) as link:
        yield Attached(model=model, optimizer=optimizer, link=link, replicas_agree=agree)
