"""How recipes keep their checkpoints, and how they go on from one, also with another number of workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from thinwire.data import Shards, ShuffleRing, Streams
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.link import Link
from thinwire.errors import UsageError
from thinwire.recipes.base import Carried, Plan
from thinwire.recipes.config import RunConfig
from thinwire.recipes.joined import Peers
from thinwire.recipes.meter import Meter


class Course:
    """The optimizer with its settings over time, which follow from the plan."""

    def __init__(
        self, optimizer: Optimizer, schedule: Callable[[Optimizer, Plan], LRScheduler], plan: Plan
    ) -> None:
        self.optimizer = optimizer
        self._make = schedule
        self._plan = plan
        self._settings = [{**group, "params": None} for group in optimizer.param_groups]
        self._schedule = schedule(optimizer, plan)

    def step(self) -> None:
        """After every optimizer step."""
        self._schedule.step()

    def follow(self, other: Course) -> None:
        """Have the learning rates of another, which makes the steps."""
        for group, leading in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            group["lr"] = leading["lr"]

    def restart(self, step: int) -> None:
        """Keep the optimizer's moments, and take the settings that the plan has for `step`.

        For another number of workers than before: learning rates and the number of steps follow from it.
        """
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**settings, "params": parameters})
        self._schedule = self._make(self.optimizer, self._plan)
        with warnings.catch_warnings():
            # "before optimizer.step()": there were steps, in the run that was saved
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            for _ in range(step):
                self._schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Of the schedule; the optimizer has its own."""
        return self._schedule.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Of the schedule."""
        self._schedule.load_state_dict(saved)


@dataclass(slots=True)
class Carry:
    """What a model carries from batch to batch, as an LSTM does; each worker has its own."""

    device: torch.device
    state: Carried = None

    def state_dict(self) -> dict[str, Any]:
        """Nothing if nothing is carried."""
        return {} if self.state is None else {str(i): t for i, t in enumerate(self.state)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state = tuple(saved[str(i)].to(self.device) for i in range(len(saved))) or None

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Other workers hold other rows of text, to which nothing that was carried belongs."""
        self.state = None


@dataclass(slots=True)
class Keeper:
    """Saves every so many steps, and at the end."""

    checkpoint: Checkpoint | None
    every: int
    meter: Meter
    last: int
    """The step that was saved or loaded last."""

    def stepped(self) -> None:
        """Save if it is time."""
        if self.every and self.meter.step % self.every == 0:
            self.save()

    def save(self) -> None:
        """Save unless this step is already."""
        if self.checkpoint is not None and self.meter.step != self.last:
            self.checkpoint.save(self.meter.step)
            self.last = self.meter.step


@contextmanager
def keep(
    config: RunConfig,
    folder: Path | None,
    peers: Peers,
    model: nn.Module,
    course: Course,
    shards: Shards | Streams | ShuffleRing,
    meter: Meter,
    carry: Carry,
) -> Iterator[Keeper]:
    """Go on from the newest checkpoint if that is asked for; then save as `config` says, the end included."""
    if folder is None or not (config.save_every or config.resume):
        yield Keeper(None, 0, meter, 0)
        return
    if not isinstance(peers, Link):
        raise UsageError("checkpoints are saved through a link; this run was joined by another system")
    settings = {"recipe": config.recipe, "seed": config.seed, "samples": shards.num_samples}
    settings |= {"epochs": config.epochs, "batch size": config.batch_size}
    settings |= {"shuffle": config.shuffle}
    with Checkpoint(
        folder,
        link=peers,
        model=model,
        optimizer=course.optimizer,
        settings=settings,
        schedule=course,
        shards=shards,
        meter=meter,
        carry=carry,
    ) as checkpoint:
        num_steps = meter.plan.num_steps
        saved = checkpoint.load() if config.resume else None
        if saved is not None:
            epochs_left = config.epochs - 1 - shards.epoch
            left = shards.num_batches(config.batch_size) + epochs_left * (num_steps // config.epochs)
            meter.plan = replace(meter.plan, num_steps=meter.step + left)
            if saved.world_size != peers.world_size:
                course.restart(num_steps - left)
        keeper = Keeper(checkpoint, config.save_every, meter, 0 if saved is None else saved.step)
        yield keeper
        keeper.save()
