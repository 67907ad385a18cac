"""One training of a fidelity study: its task and its result."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.errors import ThinwireError
from thinwire.event_log import read_events
from thinwire.events import Evaluated, Event
from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig
from thinwire.recipes.virtual import VirtualCluster, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityTask:
    """One training with one seed."""

    strategy: str
    """The strategy as asked for, settings included."""
    slow: str
    """The host that computes slower, if one does."""
    config: RunConfig
    cluster: VirtualCluster
    folder: Path
    """The folder of its events."""
    deadline_s: float
    """By the machine's monotonic clock, which all processes share."""

    @property
    def key(self) -> tuple[object, ...]:
        """The settings that identify a run."""
        config = self.config
        sizes = (config.workers, config.batch_size, config.epochs, config.seed)
        return (config.recipe, self.strategy, config.shuffle, self.slow, *sizes)

    def __str__(self) -> str:
        return f"{self.config.recipe}, {self.strategy}, {self.config.shuffle}, seed {self.config.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityRun:
    """The result of one training."""

    recipe: str
    strategy: str
    slow: str
    workers: int
    batch_size: int
    epochs: int
    seed: int
    metric: str
    value: float | None
    loss: float | None
    curve: list[tuple[int, float, float | None, float | None]]
    """Epoch, virtual seconds, metric, test loss."""
    steps: int
    virtual_s: float
    sent_bytes_per_step: float
    distance: float
    batched: bool
    wall_s: float
    shuffle: str = "dealt"

    @property
    def kind(self) -> tuple[str, str, str, str]:
        """The settings it shares with runs of other seeds."""
        return (self.recipe, self.strategy, self.shuffle, self.slow)

    @property
    def key(self) -> tuple[object, ...]:
        return (*self.kind, self.workers, self.batch_size, self.epochs, self.seed)


def train(task: FidelityTask) -> FidelityRun:
    """Train in this process, which does nothing else."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True  # batches have the same shape all along
    began_s, config = time.monotonic(), task.config

    def watch(event: Event) -> None:
        if time.monotonic() > task.deadline_s:
            raise ThinwireError("the time is up", hint="cut the study into several commands, with --resume")

    simulated = simulate(registry.get(config.recipe), config, task.cluster, task.folder, watch)
    evaluated = [event.record for event in read_events(task.folder) if isinstance(event.record, Evaluated)]
    summary = simulated.summary
    return FidelityRun(
        recipe=config.recipe,
        strategy=task.strategy,
        slow=task.slow,
        workers=config.workers,
        batch_size=config.batch_size,
        epochs=config.epochs,
        seed=config.seed,
        metric=summary.metric,
        value=summary.value,
        loss=summary.loss,
        curve=[(e.epoch, e.train_s, e.value, e.loss) for e in evaluated],
        steps=summary.steps,
        virtual_s=summary.train_s,
        sent_bytes_per_step=summary.sent_bytes_per_step,
        distance=simulated.distance,
        batched=simulated.batched,
        wall_s=time.monotonic() - began_s,
        shuffle=config.shuffle,
    )
