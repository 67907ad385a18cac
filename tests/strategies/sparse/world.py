"""Gradients fed to a strategy bucket by bucket, as the engine does it, in one thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.inline import Inline
from tests.strategies.inline import make_core
from thinwire.strategies.base import Strategy
from thinwire.traffic import Traffic
from thinwire.wire.local import LocalWorld

Shapes = Sequence[tuple[int, int]]
"""Of every bucket: the sizes of a large parameter and of one small enough to arrive exact; 0: there is
none."""


class World:
    """The same strategy on several workers, which share one thread."""

    def __init__(
        self,
        strategy: Strategy,
        world_size: int,
        shapes: Shapes,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        rate: float | None = 1.0,
    ) -> None:
        """`device` "meta": sizes alone, without numbers."""
        self.strategy, self.world_size, self.rate = strategy, world_size, rate
        self._inline = Inline()
        world = LocalWorld(world_size)
        parameters = [
            [torch.zeros(size, dtype=dtype, device=device) for size in sizes if size] for sizes in shapes
        ]
        self.cores = [
            make_core(strategy, world.lane(rank), self._inline, parameters, lambda: self.rate)
            for rank in range(world_size)
        ]
        self.states: list[Any] = [core.groups[0].state for core in self.cores]

    @property
    def traffic(self) -> list[Traffic]:
        """So far, by worker."""
        return [core.meter.traffic for core in self.cores]

    def step(self, gradients: Sequence[Sequence[Tensor]] | None = None) -> list[list[Tensor]]:
        """Reduce these gradients, by worker and bucket, or sizes alone; gives what every worker has then."""
        tasks = []
        for rank, core in enumerate(self.cores):
            for index, bucket in enumerate(core.buckets):
                if gradients is not None:
                    bucket.gradient[: bucket.num_parameters] = gradients[rank][index]
                tasks.append(core.reduce(bucket, index))
        self._inline.settle()
        for task in tasks:
            assert task.wait(0), f"deadlock: {task.name} waits {task.waits_for}"
        for core in self.cores:
            core.steps += 1
        return [
            [bucket.gradient[: bucket.num_parameters].clone() for bucket in core.buckets]
            for core in self.cores
        ]

    def residual(self, bucket: int) -> Tensor:
        """Summed over workers."""
        return torch.stack([state.residuals[bucket] for state in self.states]).sum(0)


def played_traffic(strategy: Strategy, world_size: int, shapes: Shapes, steps: int) -> list[Traffic]:
    """The traffic of these steps by worker, from sizes alone."""
    world = World(strategy, world_size, shapes, device="meta")
    for _ in range(steps):
        world.step()
    return world.traffic


def random_gradients(
    world_size: int, shapes: Shapes, seed: int, dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    """Heavy-tailed, partly the same on all workers, of another size in every bucket."""
    generator = torch.Generator().manual_seed(seed)

    def draw(numel: int) -> Tensor:
        return torch.randn(numel, generator=generator, dtype=torch.float64) ** 3

    common = [draw(large + small) for large, small in shapes]
    return [
        [((each + draw(each.numel())) * 3.0**bucket).to(dtype) for bucket, each in enumerate(common)]
        for _ in range(world_size)
    ]
