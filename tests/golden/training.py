"""One small training in float64 with 4 workers and 60 steps, in threads and on the virtual clock."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import thinwire as tw
from tests.worlds import run_threads
from thinwire.hosts.description import describe
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.session import Session
from thinwire.simulate.worker import Learner
from thinwire.strategies.base import Strategy
from thinwire.wire.base import Lane

WORKERS, STEPS, BATCH = 4, 60, 4
BUCKET_BYTES = 6_000
"""Several buckets: the model has 33 kB."""


def parts(kind: str) -> tuple[nn.Module, Optimizer]:
    """The model and its optimizer; `kind` is "momentum", "plain" or "adam"."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 40))
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    if kind == "adam":
        return model, AdamW(model.parameters(), lr=0.01)
    return model, SGD(model.parameters(), lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


def learn(model: nn.Module, optimizer: Optimizer, step: int, rank: int) -> float:
    """Leave the gradients of one batch in the model, and set the step's learning rate."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, 24, generator=generator, dtype=torch.float64)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.99
    optimizer.zero_grad()
    loss = (model(x) - x.sin().repeat(1, 2)[:, :40]).square().mean()
    loss.backward()
    return float(loss.detach())


def digest(model: nn.Module) -> str:
    """Of all parameters, bit for bit."""
    data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()[:16]


def row(model: nn.Module, losses: list[float], sent_bytes: int) -> dict[str, Any]:
    """What is recorded of one worker."""
    return {
        "losses": [loss.hex() for loss in losses[9::10]],
        "weights": digest(model),
        "sent_bytes": sent_bytes,
    }


def plain_torch() -> dict[str, str]:
    """The weights of one worker that trains alone, without anything of thinwire, by optimizer."""
    found = {}
    for kind in ("momentum", "plain", "adam"):
        model, optimizer = parts(kind)
        for step in range(STEPS):
            learn(model, optimizer, step, 0)
            optimizer.step()
        found[kind] = digest(model)
    return found


def in_threads(strategy: Strategy, kind: str) -> list[dict[str, Any]]:
    def worker(lane: Lane) -> dict[str, Any]:
        model, optimizer = parts(kind)
        losses = []
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
            for step in range(STEPS):
                losses.append(learn(model, optimizer, step, link.rank))
                optimizer.step()
            link.synchronize()
            return row(model, losses, link.stats.sent_bytes)  # before detach, which may average

    return run_threads(WORKERS, worker)


class _Learner(Learner):
    def __init__(self, rank: int, kind: str) -> None:
        self.model, self.optimizer = parts(kind)
        self.rank, self.losses = rank, list[float]()
        self._step = 0

    def draw(self) -> bool:
        return self._step < STEPS

    def learn(self) -> None:
        self.losses.append(learn(self.model, self.optimizer, self._step, self.rank))

    def stepped(self) -> None:
        self._step += 1


class _Learners:
    def __init__(self, kind: str) -> None:
        self.all = [_Learner(rank, kind) for rank in range(WORKERS)]

    def of(self, host: int) -> _Learner:
        return self.all[host]

    def change(self, hosts: object, joined: object, furthest: object) -> None:
        pass


def on_the_clock(strategy: Strategy, kind: str) -> list[dict[str, Any]]:
    network = Network(describe(hosts=WORKERS, rate="20mbit", slow=("1=0.7",)), latency_s=0.001)
    model = ComputeModel.of(0.02, bucket_bytes=BUCKET_BYTES)
    learners = _Learners(kind)
    session = Session(network, strategy, learners, model)
    session.epoch()
    return [
        {
            **row(learner.model, learner.losses, session.stats(learner.rank).sent_bytes),
            "seconds": session.clock.now_s.hex(),
        }
        for learner in learners.all
    ]
