"""A small training in threads that saves and goes on, with a strategy that keeps a residual per worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from tests.worlds import run_threads
from thinwire.data import Shards
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.folders import Manifest
from thinwire.strategies.base import Bucket, Strategy
from thinwire.wire.base import Lane
from thinwire.wire.wire import Wire


@dataclass(slots=True)
class Leftover:
    residuals: list[Tensor]
    rounds: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Half(Strategy):
    """Sends half of every gradient, and adds the other half to the next one."""

    @property
    def replicas_agree(self) -> bool:
        return True

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> Leftover:
        return Leftover([bucket.zeros("residual", on_resize="sum", part="large") for bucket in buckets])

    async def reduce(self, bucket: Bucket, state: Leftover, wire: Wire) -> None:
        lossy, residual = bucket.gradient[: bucket.exact_from], state.residuals[bucket.index]
        residual += lossy
        lossy.copy_(residual).div_(2)
        residual -= lossy
        state.rounds += 1
        await wire.all_reduce_(bucket.gradient)
        bucket.gradient.div_(wire.world_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone(Strategy):
    """Workers train apart, so their models differ."""

    async def reduce(self, bucket: Bucket, state: Any, wire: Wire) -> None:
        return


@dataclass(slots=True)
class Trained:
    """What one worker has at the end."""

    weights: list[Tensor]
    residuals: list[Tensor]
    """By parameter."""
    buffers: list[Tensor]
    saved: Manifest | None
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to train, and from where to where."""

    folder: Path
    until: int
    save_at: tuple[int, ...] = ()
    strategy: Strategy = Half()
    width: int = 8
    settings: tuple[tuple[str, object], ...] = ()
    load: bool = True

    def __call__(self, lane: Lane) -> Trained:
        """As one worker of a world of threads."""
        generator = torch.Generator().manual_seed(1)
        data = torch.randn(96, 4, generator=generator)
        model = nn.Sequential(nn.Linear(4, self.width), nn.BatchNorm1d(self.width), nn.Linear(self.width, 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        shards = Shards(num_samples=96, rank=lane.rank, world_size=lane.world_size)
        saved, loss, residuals = None, 0.0, list[Tensor]()
        with (
            tw.attach(model, optimizer, self.strategy, process_group=lane, buffers="local") as link,
            Checkpoint(
                self.folder,
                link=link,
                model=model,
                optimizer=optimizer,
                settings=dict(self.settings),
                schedule=schedule,
                shards=shards,
            ) as checkpoint,
        ):
            if self.load:
                saved = checkpoint.load()
            batches = shards.batches(4)
            for step in range((saved.step if saved else 0) + 1, self.until + 1):
                x = data[next(batches)]
                optimizer.zero_grad()
                value = (model(x) - x.sum(1, keepdim=True)).square().mean()
                value.backward()
                optimizer.step()
                schedule.step()
                loss = float(value.detach())
                if step in self.save_at:
                    checkpoint.save(step)
            by_parameter = link.state_dict()["leaves"].get("residual", {})
            residuals = [residual.flatten() for residual in by_parameter.values()]
        weights = [p.detach().clone() for p in model.parameters()]
        return Trained(weights, residuals, [b.clone() for b in model.buffers()], saved, loss)


def run(world_size: int, job: Job) -> list[Trained]:
    """The job in threads; results in order of rank."""
    return run_threads(world_size, job)


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether the bits are the same."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
