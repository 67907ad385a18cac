"""A small training that every strategy can do, in any world."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.simulate import sizes
from thinwire.strategies.base import Strategy
from thinwire.traffic import Traffic
from thinwire.wire.base import Lane

BATCH, STEPS = 4, 6
BUCKET_BYTES = 256  # several buckets even for this small model
make_optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass
class Outcome:
    weights: list[Tensor]
    losses: list[float]
    counted: Traffic
    """The strategy's own traffic, as counted."""
    state: dict[str, Any]
    distance: float


def model_and_optimizer(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model, make_optimizer(model.parameters())


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> float:
    x, y = batch(step, rank)
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def train(strategy: Strategy, lane: Lane | None, steps: int = STEPS) -> Outcome:
    """Train for some steps and report; `lane` None: in whatever world the process is."""
    model, optimizer = model_and_optimizer(seed=lane.rank if lane else 0)  # attach makes them alike
    with tw.attach(
        model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES, buffers="local"
    ) as link:
        losses = [step_once(model, optimizer, step, link.rank) for step in range(steps)]
        link.synchronize()
        counted = link._core.meter.traffic
        assert link.stats.steps == steps
        distance, state = link.consensus_distance(), link.state_dict()
        weights = [p.detach().clone() for p in model.parameters()]  # before detach, which may average
    return Outcome(weights, losses, counted, state, distance)


def played_traffic(strategy: Strategy, world_size: int) -> list[Traffic]:
    """The traffic of the same training by worker, played with sizes alone."""
    shapes = [tuple(p.shape) for p in model_and_optimizer()[0].parameters()]
    return sizes.traffic(
        shapes,
        world_size,
        strategy,
        steps=STEPS,
        bucket_bytes=BUCKET_BYTES,
        dtype=torch.float64,
        make_optimizer=make_optimizer,
    )
