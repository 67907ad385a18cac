"""Where a scenario runs: alone without thinwire, in a thread of a world, or in a process of one.

A scenario is a function of a Place that trains and gives back arrays. Run alone, with the whole batch, it
says what it must give with several workers. It is checked in threads beside its test, and
tests/engine/test_features_integration.py runs it in processes as well.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

import thinwire as tw
from tests.exact.compare import Arrays
from tests.worlds import run_threads
from thinwire.strategies.base import Overlap
from thinwire.wire.local import LocalLane

BUCKET_BYTES = 200
"""Several buckets even for the small net."""
BATCH = 12

Sample = tuple[Tensor, Tensor]
_building = threading.Lock()


class NoLink:
    """Stands in for a link where there is nobody to talk to."""

    rank, world_size = 0, 1

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    join = no_sync

    def weight(self, num_samples: float) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def detach(self) -> None:
        pass

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self._model.parameters(), max_norm)

    def __enter__(self) -> NoLink:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Place:
    """One worker's place in a world."""

    world: Literal["alone", "process"] | LocalLane
    overlap: Overlap = "backward"

    @property
    def rank(self) -> int:
        if isinstance(self.world, str):
            return 0 if self.world == "alone" else dist.get_rank()
        return self.world.rank

    @property
    def world_size(self) -> int:
        if isinstance(self.world, str):
            return 1 if self.world == "alone" else dist.get_world_size()
        return self.world.world_size

    def attach(
        self, model: nn.Module, optimizer: Optimizer, *, lane: str = "only", **settings: Any
    ) -> tw.Link | NoLink:
        """Attach with all-reduce and small buckets; links that are open together have a lane each."""
        if self.world == "alone":
            return NoLink(model)
        strategy = settings.pop("strategy", tw.AllReduce(overlap=self.overlap))
        own = self.world.lane(lane) if isinstance(self.world, LocalLane) else None
        settings = {"bucket_bytes": BUCKET_BYTES, **settings}
        return tw.attach(model, optimizer, strategy, process_group=own, **settings)

    def part(self, step: int) -> Sample:
        """This worker's equal part of a step's batch."""
        x, y = batch(step)
        return x.chunk(self.world_size)[self.rank], y.chunk(self.world_size)[self.rank]


Scenario = Callable[[Place], Arrays]


def alone(scenario: Scenario) -> Arrays:
    return scenario(Place("alone"))


def in_threads(world_size: int, scenario: Scenario, overlap: Overlap = "backward") -> list[Arrays]:
    return run_threads(world_size, lambda lane: scenario(Place(lane, overlap)))


def batch(step: int) -> Sample:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model with the same weights every time; the global random state is left as it was."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


def net(seed: int = 0) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), seed
    )


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, sample: Sample) -> Tensor:
    x, y = sample
    loss: Tensor = (model(x) - y).square().mean()
    return loss


def average_gradients_(replicas: Sequence[nn.Module]) -> None:
    """By hand what AllReduce does, in the order in which worlds of threads sum."""
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            mean = functools.reduce(torch.add, gradients) / len(replicas)
            for p in parameters:
                p.grad = mean.clone()
