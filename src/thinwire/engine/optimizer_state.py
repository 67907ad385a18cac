"""An optimizer's averages of a bucket's gradients (momentum, Adam's moments), as flat as the bucket is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.engine.buckets import ParameterBucket, local

_MOMENTS = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
}
_MOMENTUM = {"SGD", "RMSprop"}
"""Optimizers whose groups have a `momentum`, which may be 0."""


def give_optimizer_state(buckets: Iterable[ParameterBucket], optimizer: Optimizer) -> None:
    """Tell each bucket its optimizer state and the learning rate of its first parameter."""
    names = _momentum_names(optimizer)
    place = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    for bucket in buckets:
        if (group := place.get(id(bucket.parameters[0]))) is not None:
            bucket.read_rate = partial(_rate, optimizer, group)
        bucket.optimizer_state = {name: OptimizerState(bucket, optimizer, name) for name in names}


def _rate(optimizer: Optimizer, group: int) -> float:
    return float(optimizer.param_groups[group]["lr"])  # loading a state replaces the groups


def _momentum_names(optimizer: Optimizer) -> Sequence[str]:
    """The optimizer's names for its averages; empty if it keeps none, or none that is known here."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _MOMENTS:
            return _MOMENTS[kind.__name__]
        if kind.__name__ in _MOMENTUM:
            return ("momentum_buffer",) if any(g["momentum"] for g in optimizer.param_groups) else ()
    return ()


class OptimizerState:
    """One number that the optimizer keeps for every number of a bucket.

    An optimizer makes it in its first step with a gradient. Until then it reads as zero, and what is
    written is dropped.
    """

    def __init__(self, bucket: ParameterBucket, optimizer: Optimizer, name: str) -> None:
        self.num_parameters = bucket.num_parameters
        self._bucket, self._optimizer, self._name = bucket, optimizer, name

    @torch.no_grad()
    def read(self, out: Tensor | None = None) -> Tensor:
        out = self._bucket.gradient.new_zeros(self.num_parameters) if out is None else out.zero_()
        for kept, part in self._pairs(out):
            part.copy_(kept)
        return out

    @torch.no_grad()
    def write_(self, data: Tensor) -> None:
        for kept, part in self._pairs(data):
            kept.copy_(part)

    @torch.no_grad()
    def add_(self, data: Tensor, scale: float = 1.0) -> None:
        for kept, part in self._pairs(data):
            kept.add_(part, alpha=scale)

    @torch.no_grad()
    def lerp_(self, data: Tensor, weight: float | Tensor) -> None:
        weights = weight if isinstance(weight, Tensor) else data.new_tensor(weight).expand_as(data)
        for (kept, part), (_, share) in zip(self._pairs(data), self._pairs(weights), strict=True):
            kept.lerp_(part, share)

    def _pairs(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The optimizer's own tensors, which loading a state replaces, and their parts of `flat`."""
        parameters = self._bucket.parameters
        parts = flat.split([local(p).numel() for p in parameters])
        kept = [self._optimizer.state.get(p, {}).get(self._name) for p in parameters]
        return [
            (local(each), part.view(local(p).shape))
            for each, p, part in zip(kept, parameters, parts, strict=True)
            if each is not None
        ]
