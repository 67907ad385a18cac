"""One training loop, alone on the whole batch, with thinwire, or with DDP."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import thinwire as tw
from tests.exact.compare import Arrays, arrays
from tests.exact.models import CASES
from thinwire.strategies.base import Overlap
from thinwire.wire.base import Lane

STEPS = 20
"""In float64 a difference shows in the first steps: 100 say the same."""
BUCKET_BYTES = 3000
"""Several buckets even for these small models."""

OptimizerName = Literal["sgd", "adamw"]
OPTIMIZERS: dict[OptimizerName, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: AdamW(model.parameters(), lr=3e-3),
}

_building = threading.Lock()


@dataclass(frozen=True, slots=True)
class Training:
    """Which model is trained by which optimizer, and in which precision."""

    case: str
    optimizer: OptimizerName
    dtype: torch.dtype = torch.float64

    def build(self, rank: int = 0) -> tuple[nn.Module, Optimizer]:
        """Only rank 0 begins with the right weights: the others have to get them from it."""
        with _building:  # workers that are threads share the global random state
            model = CASES[self.case].build(self.dtype)
        if rank > 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        return model, OPTIMIZERS[self.optimizer](model)

    def run(self, model: nn.Module, optimizer: Optimizer, rank: int = 0, world_size: int = 1) -> None:
        """Train this worker's part of every batch for `STEPS` steps with a scheduler."""
        case = CASES[self.case]
        scheduler = OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=STEPS + 1)
        for step in range(STEPS):
            x, y = case.part(step, rank, world_size, self.dtype)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    def with_thinwire(self, overlap: Overlap, lane: Lane | None) -> Arrays:
        """`lane` None: the process group this process is in."""
        rank = torch.distributed.get_rank() if lane is None else lane.rank
        model, optimizer = self.build(rank)
        strategy = tw.AllReduce(overlap=overlap)
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
            self.run(model, optimizer, link.rank, link.world_size)
        return arrays(model)

    def with_ddp(self) -> Arrays:
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        model, optimizer = self.build(rank)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        self.run(wrapped, optimizer, rank, world_size)
        return arrays(model)


TRAININGS = [Training(case, optimizer) for case in CASES for optimizer in OPTIMIZERS]
OVERLAPS: tuple[Overlap, ...] = ("forward", "backward", "none")


@functools.cache
def alone(training: Training) -> Arrays:
    """What one process with the whole batch ends with."""
    model, optimizer = training.build()
    training.run(model, optimizer)
    return arrays(model)
