"""A small training that has neurons to spare, on one of several workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.apoptosis.shrinking import Shrinking
from thinwire.events import Shrunk
from thinwire.wire.base import Lane

WIDTH = 48


@dataclass
class Outcome:
    shapes: dict[str, tuple[int, ...]]
    weights: list[Tensor]
    events: list[Shrunk]
    sent: list[int]
    """Bytes sent in each step."""
    losses: list[float] = field(default_factory=list)


def parts(seed: int = 0, *, norm: bool = False) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(8, WIDTH)]
        layers += [nn.BatchNorm1d(WIDTH)] if norm else []
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)]
        model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 8, generator=generator, dtype=torch.float64)
    return x, torch.stack([x[:, 0] * x[:, 1], x.sin().sum(1)], dim=1)


def step_once(link: tw.Link, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    x, y = batch(step, link.rank)
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    link.observe(loss)
    optimizer.step()
    return float(loss.detach())


def history(link: tw.Link) -> list[Shrunk]:
    assert isinstance(link.companion, Shrinking)
    return link.companion.history


def train(
    strategy: tw.Strategy,
    lane: Lane | None = None,
    *,
    steps: int = 24,
    settings: tw.Apoptosis | None = None,
    **options: Any,
) -> Outcome:
    model, optimizer = parts(norm=options.pop("norm", False))
    settings = settings or tw.Apoptosis(mode="aggressive", every=8, start=8, budget=0.05)
    with tw.attach(
        model, optimizer, strategy, process_group=lane, apoptosis=settings, bucket_bytes=4096, **options
    ) as link:
        sent, losses = [0], []
        for step in range(steps):
            losses.append(step_once(link, model, optimizer, step))
            link.synchronize()
            sent.append(link._core.meter.traffic.sent_bytes)
        events = list(history(link))
        weights = [p.detach().clone() for p in model.parameters()]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return Outcome(shapes, weights, events, [b - a for a, b in pairwise(sent)], losses)
