"""torchft's DiLoCo: changes of parameters are averaged every few steps, by the workers that are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.torchft_manager import missing_torchft, torchft_manager


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchftDiLoCo:
    """Local steps; their sum is averaged every `sync_every` and applied by Nesterov momentum."""

    name: str = "torchft-diloco"
    sync_every: int = 8
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    @property
    def period(self) -> int:
        return self.sync_every

    def available(self) -> str | None:
        return missing_torchft()

    @contextmanager
    def join(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[nn.Module, Optimizer]]:
        from torchft.local_sgd import DiLoCo

        outer = torch.optim.SGD(
            model.parameters(), lr=self.outer_lr, momentum=self.outer_momentum, nesterov=True
        )
        with (
            torchft_manager() as manager,
            DiLoCo(manager, [model], optimizer, outer, sync_every=self.sync_every),
        ):
            yield model, optimizer
