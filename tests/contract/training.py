"""A small training that every strategy can do, in any world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.strategies.base import Strategy
from thinwire.traffic import Cluster, Traffic, total
from thinwire.wire.base import Wire

BATCH, STEPS = 4, 6
BUCKET_BYTES = 256  # several buckets even for this small model


@dataclass
class Outcome:
    weights: list[Tensor]
    losses: list[float]
    counted: Traffic
    """Bytes and messages of the strategy's own wire, as counted."""
    stated: Traffic
    """The same, as the strategy states them from sizes alone."""
    state: dict[str, Any]
    distance: float


def model_and_optimizer(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


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


def train(strategy: Strategy, wire: Wire | None, steps: int = STEPS) -> Outcome:
    """Train for some steps and report; `wire` None: whatever world the process is in."""
    model, optimizer = model_and_optimizer(seed=wire.rank if wire else 0)  # attach makes them alike
    with tw.attach(
        model, optimizer, strategy, process_group=wire, bucket_bytes=BUCKET_BYTES, buffers="local"
    ) as link:
        losses = [step_once(model, optimizer, step, link.rank) for step in range(steps)]
        link.settle()
        counted, sizes = link._talk.meter.traffic, link.sizes
        assert link.stats.steps == steps
        distance, state = link.consensus_distance(), link.state_dict()
    cluster = Cluster(world_size=link.world_size)
    rounds = [each for step in range(steps) for each in strategy.rounds(sizes, cluster, step)]
    stated = total(rounds, rank=link.rank, world_size=link.world_size)
    weights = [p.detach().clone() for p in model.parameters()]
    return Outcome(weights, losses, counted, stated, state, distance)


def train_in_process(strategy: Strategy) -> tuple[list[Tensor], Traffic, Traffic]:
    outcome = train(strategy, None)
    return outcome.weights, outcome.counted, outcome.stated
