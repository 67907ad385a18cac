"""Calls of a model, kept and made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copy(self) -> Call:
        return self.map(lambda t: t.detach().clone())

    def first(self, rows: int) -> Call:
        """The same call with fewer samples."""
        return self.map(lambda t: t[:rows] if t.dim() else t)

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    def rows(self) -> int:
        """Samples in it."""
        return next((len(t) for t in tensors_in((self.args, self.kwargs)) if t.dim()), 0)

    def run(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """In here the model is in evaluation mode; modes and random numbers are as before after it."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """All tensors in what a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (t for each in value.values() for t in tensors_in(each, depth))
    elif isinstance(value, list | tuple | set):
        yield from (t for each in value for t in tensors_in(each, depth))
    elif depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        yield from (t for each in vars(value).values() for t in tensors_in(each, depth - 1))
