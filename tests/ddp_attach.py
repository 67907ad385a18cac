"""attach by DistributedDataParallel: a script written for thinwire, run unchanged as torch alone runs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire as tw


class _Forward(nn.Module):
    """The forward of a model whose own was replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return type(self.model).forward(self.model, *args)


class DDPLink:
    """What the examples use of a link."""

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stats = tw.Stats()
        self._model = model
        self._ddp: Any = DistributedDataParallel(_Forward(model))
        vars(model)["forward"] = self._ddp  # past nn.Module, which would make it a child of its own child

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def synchronize(self) -> None:
        """Nothing is under way between steps."""

    def average_(self) -> None:
        """All replicas are the same."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del vars(self._model)["forward"]
        self._ddp = None  # its hooks go with it


def attach(model: nn.Module, optimizer: Optimizer, strategy: tw.Strategy) -> DDPLink:
    """In the place of thinwire's, whatever the strategy."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return DDPLink(model)
