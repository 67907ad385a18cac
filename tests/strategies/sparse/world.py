"""Gradients fed to a strategy bucket by bucket, as the engine does it, in one thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.engine.driver import Inline
from thinwire.strategies.base import Parameters
from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.state import SparseState
from thinwire.traffic import Sizes
from thinwire.wire.metered import Meter, MeteredWire
from thinwire.wire.threads import ThreadWorld

Shapes = Sequence[tuple[int, int]]
"""Of every bucket: numbers that may be lossy, and numbers that must be exact."""


@dataclass
class FlatBucket:
    """`exact_from` numbers that may be lossy, then some that must arrive exact."""

    index: int
    exact_from: int
    gradient: Tensor
    companions: Mapping[str, Parameters] = field(default_factory=dict)
    rate: float | None = 1.0

    @property
    def num_parameters(self) -> int:
        return self.gradient.numel()

    def name_at(self, place: int) -> str:
        return f"layer{self.index}.weight"

    def read(self, out: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def write_(self, data: Tensor) -> None:
        raise NotImplementedError

    def add_(self, data: Tensor, scale: float = 1.0) -> None:
        raise NotImplementedError

    def lerp_(self, data: Tensor, weight: float | Tensor) -> None:
        raise NotImplementedError


class World:
    """The same strategy on several workers, which share one thread."""

    def __init__(
        self,
        strategy: SparseStrategy,
        world_size: int,
        shapes: Shapes,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.strategy = strategy
        self.world_size = world_size
        self.shapes = shapes
        self._inline = Inline()
        threads = ThreadWorld(world_size)
        self.meters = [Meter() for _ in range(world_size)]
        self._wires = [MeteredWire(threads.wire(rank), meter) for rank, meter in enumerate(self.meters)]
        self.buckets = [
            [
                FlatBucket(i, lossy, torch.zeros(lossy + tail, dtype=dtype))
                for i, (lossy, tail) in enumerate(shapes)
            ]
            for _ in range(world_size)
        ]
        self.states: list[SparseState] = [
            strategy.init(buckets, wire) for buckets, wire in zip(self.buckets, self._wires, strict=True)
        ]

    @property
    def sizes(self) -> Sizes:
        itemsize = self.buckets[0][0].gradient.element_size()
        return Sizes(
            tuple((lossy + tail, itemsize) for lossy, tail in self.shapes),
            exact=tuple(tail for _, tail in self.shapes),
        )

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Reduce these gradients, of each worker those of each bucket; what every worker has then."""
        coroutines = []
        for buckets, state, wire, fed in zip(self.buckets, self.states, self._wires, gradients, strict=True):
            for bucket, gradient in zip(buckets, fed, strict=True):
                bucket.gradient.copy_(gradient)
                coroutines.append(self.strategy.reduce(bucket, state, wire))
        self._inline.run(*coroutines)
        return [[bucket.gradient.clone() for bucket in buckets] for buckets in self.buckets]

    def residual(self, bucket: int) -> Tensor:
        """Summed over workers."""
        return torch.stack([state.residuals[bucket] for state in self.states]).sum(0)


def random_gradients(
    world_size: int, shapes: Shapes, seed: int, dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    """Heavy-tailed, partly the same on all workers, of another size in every bucket."""
    generator = torch.Generator().manual_seed(seed)

    def draw(numel: int) -> Tensor:
        return torch.randn(numel, generator=generator, dtype=torch.float64) ** 3

    common = [draw(lossy + tail) for lossy, tail in shapes]
    return [
        [((each + draw(each.numel())) * 3.0**bucket).to(dtype) for bucket, each in enumerate(common)]
        for _ in range(world_size)
    ]
