"""torchft's LocalSGD: parameters are averaged every few steps, by the workers that are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.torchft_manager import missing_torchft, torchft_manager


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchftLocalSgd:
    """Local steps; parameters are averaged every `sync_every` of them."""

    name: str = "torchft-local-sgd"
    sync_every: int = 8

    @property
    def period(self) -> int:
        return self.sync_every

    def available(self) -> str | None:
        return missing_torchft()

    @contextmanager
    def join(self, model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[nn.Module, Optimizer]]:
        from torchft.local_sgd import LocalSGD

        with torchft_manager() as manager, LocalSGD(manager, model, optimizer, sync_every=self.sync_every):
            yield model, optimizer
