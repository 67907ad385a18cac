"""Trains a recipe with any system, by the loop of `thinwire train`, counted the same way for all."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.bench.config import Study, run_folder
from thinwire.bench.measure import Paths, joined
from thinwire.bench.systems import Ours, System
from thinwire.events import EventWriter, RunStarted
from thinwire.recipes import registry
from thinwire.recipes.base import Data, Recipe, Samples, Training
from thinwire.recipes.config import RunConfig, versions, write_config
from thinwire.recipes.joined import Join, Joined, Peers
from thinwire.recipes.train import Worker, train
from thinwire.strategies.registry import resolved


def train_study(bench: Path, study: Study, system: System, paths: Paths) -> None:
    """Train with `system` as one of the workers; the run folder is that of any run."""
    folder = run_folder(bench, study, system.name)
    recipe = shortened(registry.get(study.recipe), study.samples)
    config = run_config(study, recipe, system)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        write_config(folder, config)
    paths.set_rate(study.rate_bits_per_s)
    with EventWriter(folder, rank) as writer:
        writer.write(
            RunStarted(
                config=asdict(config),
                versions=versions(),
                host=socket.gethostname(),
                pid=os.getpid(),
                world_size=world_size,
            )
        )
        train(recipe, config, Worker(rank, world_size), writer.write, join=join_by(system, paths))
    paths.open()


def run_config(study: Study, recipe: Recipe, system: System) -> RunConfig:
    """The same for all systems, but for the name."""
    strategy = system.name.split(":")[0]
    return RunConfig(
        recipe=study.recipe,
        strategy=strategy,
        settings=resolved(system.strategy) if isinstance(system, Ours) else {},
        workers=study.workers,
        epochs=study.epochs,
        batch_size=study.batch_size or recipe.batch_size,
        seed=0,
        data=study.data,
        device="cpu",
        evaluate_every=study.evaluate_every,
    )


@dataclass(frozen=True, slots=True)
class First:
    """The first samples of others."""

    samples: Samples
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.samples))

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return self.samples.take(indices)


def shortened(recipe: Recipe, samples: int | None) -> Recipe:
    """The recipe, trained on its first samples only, and judged by a quarter as many."""
    if samples is None:
        return recipe

    def training() -> Training:
        whole = recipe.training()

        def data(folder: Path | None) -> Data:
            full = whole.data(folder)
            return replace(full, train=First(full.train, samples), test=First(full.test, samples // 4))

        return replace(whole, data=data)

    return replace(recipe, training=training)


def join_by(system: System, paths: Paths) -> Join:
    """Joins workers by any system, ours or not."""

    @contextmanager
    def join(model: nn.Module, optimizer: Optimizer) -> Iterator[Joined]:
        with joined(system, model, optimizer) as (wrapped, stepper, link):
            agree = isinstance(system, Ours) and system.replicas_agree
            peers = Counted(link or Team(model), paths)
            yield Joined(model=wrapped, optimizer=stepper, peers=peers, replicas_agree=agree)

    return join


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What the loop's meter reads; 0 where a system does not tell."""

    rounds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    exposed_s: float = 0.0
    instruments: Mapping[str, float] = field(default_factory=dict)


class Team:
    """The workers of a rival, as the training loop needs them: asked through the process group itself."""

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stats = Counts()
        self._model = model

    def sum(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        tensors = [t.data for t in (*self._model.parameters(), *self._model.buffers())]
        tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        own = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(self.world_size)
        try:
            yield
        finally:
            for tensor, saved in zip(tensors, own, strict=True):
                tensor.copy_(saved)


@dataclass(frozen=True, slots=True)
class Counted:
    """Other workers whose bytes are counted at the interface, as those of everybody else."""

    peers: Peers
    paths: Paths

    @property
    def rank(self) -> int:
        return self.peers.rank

    @property
    def world_size(self) -> int:
        return self.peers.world_size

    @property
    def stats(self) -> Counts:
        told = self.peers.stats
        return Counts(
            rounds=told.rounds,
            sent_bytes=self.paths.sent_bytes() if self.paths.shaped else told.sent_bytes,
            received_bytes=told.received_bytes,
            messages=told.messages,
            exposed_s=told.exposed_s,
            instruments=told.instruments,
        )

    def sum(self, values: Sequence[float]) -> list[float]:
        return self.peers.sum(values)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return self.peers.clip_grad_norm_(max_norm)

    def averaged(self) -> AbstractContextManager[None]:
        return self.peers.averaged()
