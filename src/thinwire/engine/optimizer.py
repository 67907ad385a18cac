"""A user's optimizer, bucket by bucket: its averages as flat as the bucket is, and its step for one alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from thinwire.engine.buckets import ParameterBucket, local
from thinwire.engine.span import Span
from thinwire.errors import UsageError

_MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("exp_avg", "exp_avg_sq")),
    "Adamax": ("exp_avg", "exp_inf"),
}
_MOMENTUM = {"SGD", "RMSprop"}
"""Optimizers whose groups have a `momentum`, which may be 0."""
_NORMALISED = ("ada", "rmsprop", "muon", "lion", "lamb", "lars", "shampoo", "soap", "sophia")
"""Parts of the names of optimizers whose steps do not grow with the gradient."""
_ELSE = "use AllReduce(overlap='backward')"


def give_optimizer_state(buckets: Iterable[ParameterBucket], optimizers: Sequence[Optimizer]) -> None:
    """Tell each bucket its optimizer state, and of its first parameter the learning rate and whether steps
    are normalised."""
    names = dict.fromkeys(name for each in optimizers for name in _momentum_names(each))
    place = {
        id(p): (optimizer, i)
        for optimizer in optimizers
        for i, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    for bucket in buckets:
        if (found := place.get(id(bucket.parameters[0]))) is not None:
            bucket.read_rate = partial(_rate, *found)
            bucket.normalised = is_normalised(found[0])
        bucket.optimizer_state = {name: OptimizerState(bucket, optimizers, name) for name in names}


def is_normalised(optimizer: Optimizer) -> bool:
    """Whether its steps are as long for a gradient ten times as large, as Adam's are and SGD's are not.

    >>> parameters = [torch.zeros(1, requires_grad=True)]
    >>> is_normalised(torch.optim.AdamW(parameters)), is_normalised(torch.optim.SGD(parameters, lr=0.1))
    (True, False)
    """
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(part in name for name in names for part in _NORMALISED)


def _rate(optimizer: Optimizer, group: int) -> float:
    return float(optimizer.param_groups[group]["lr"])  # loading a state replaces the groups


def _momentum_names(optimizer: Optimizer) -> tuple[str, ...]:
    """The optimizer's names for its averages; empty if it keeps none, or none that is known here."""
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _MOMENTS:
            return _MOMENTS[kind.__name__]
        if kind.__name__ in _MOMENTUM:
            return ("momentum_buffer",) if any(g["momentum"] for g in optimizer.param_groups) else ()
    return ()


class OptimizerState:
    """One number that the optimizer keeps for every number of a bucket.

    Until an optimizer makes it, in its first step with a gradient, it reads as zero and writing does nothing.
    """

    def __init__(self, bucket: ParameterBucket, optimizers: Sequence[Optimizer], name: str) -> None:
        self.num_parameters = bucket.num_parameters
        self._bucket, self._optimizers, self._name = bucket, optimizers, name

    @torch.no_grad()
    def read(self, out: Tensor | None = None) -> Tensor:
        out = self._bucket.gradient.new_zeros(self.num_parameters) if out is None else out.zero_()
        for kept, part in self._pairs(out):
            part.copy_(kept)
        return out

    @torch.no_grad()
    def read_span(self, start: int, stop: int) -> Tensor:
        out = self._bucket.gradient.new_zeros(stop - start)
        self._span(start, stop).copy_to_(out)
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
    def add_span_(self, start: int, data: Tensor, scale: float = 1.0) -> None:
        self._span(start, start + data.numel()).add_(data, scale)

    @torch.no_grad()
    def lerp_(self, data: Tensor, weight: float | Tensor) -> None:
        weights = weight if isinstance(weight, Tensor) else data.new_tensor(weight).expand_as(data)
        for (kept, part), (_, share) in zip(self._pairs(data), self._pairs(weights), strict=True):
            kept.lerp_(part, share)

    def _pairs(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The optimizer's own tensors, which loading a state replaces, and their parts of `flat`."""
        parameters = self._bucket.parameters
        parts = flat.split([local(p).numel() for p in parameters])
        kept = [self._kept(p) for p in parameters]
        return [
            (local(each), part.view(local(p).shape))
            for each, p, part in zip(kept, parameters, parts, strict=True)
            if each is not None
        ]

    def _span(self, start: int, stop: int) -> Span:
        parameters = self._bucket.parameters
        kept = [self._kept(p) for p in parameters]
        own = [None if each is None else local(each) for each in kept]
        return Span(own, [local(p).numel() for p in parameters], start, stop)

    def _kept(self, parameter: Tensor) -> Tensor | None:
        for optimizer in self._optimizers:
            if (state := optimizer.state.get(parameter)) is not None:
                kept: Tensor | None = state.get(self._name)
                return kept
        return None


class PartialOptimizer:
    """Records what `optimizer.step()` would do now, and does it bucket by bucket later.

    The optimizer's own step is called with parameter groups cut down to one bucket. That is the same for
    optimizers that treat each parameter by itself, as all of torch.optim but LBFGS do.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        if len(optimizers) > 1:
            raise UsageError(
                f"overlap='forward' records the step of one optimizer, got {len(optimizers)}", hint=_ELSE
            )
        optimizer = optimizers[0]
        kind = type(optimizer)
        if kind is LBFGS or not kind.__module__.startswith("torch.optim"):
            raise UsageError(
                f"overlap='forward' steps one bucket at a time, which {kind.__name__} may not survive",
                hint=_ELSE,
            )
        self._optimizer = optimizer
        self._step = kind.step.__wrapped__  # type: ignore[attr-defined]  # without the users' step hooks
        self._groups: list[tuple[dict[str, Any], set[int]]] = []
        self._scaling: dict[str, Tensor] = {}

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse the ways of calling `optimizer.step` that need the gradients now."""
        if any(callable(a) for a in (*args[1:], *kwargs.values())):
            raise UsageError("overlap='forward' cannot step with a closure", hint=_ELSE)

    @property
    def skips(self) -> bool:
        """Whether a GradScaler has told it to leave the recorded step out, should it have to."""
        return "found_inf" in self._scaling

    def record(self) -> None:
        """Remember the groups as they are: settings, the learning rate of this step included, and members."""
        self._groups = [
            (
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"},
                {id(p) for p in group["params"]},
            )
            for group in self._optimizer.param_groups
        ]
        set_by_scaler = {name: getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf")}
        self._scaling = {name: v.clone() for name, v in set_by_scaler.items() if v is not None}

    @torch.no_grad()
    def step(self, bucket: ParameterBucket) -> None:
        """Step the parameters of one bucket, whose gradients are in place."""
        groups = self._optimizer.param_groups
        try:
            self._optimizer.param_groups = [
                {**settings, "params": [p for p in bucket.parameters if id(p) in members]}
                for settings, members in self._groups
            ]
            self._optimizer.__dict__ |= self._scaling
            self._step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
            for name in self._scaling:
                del self._optimizer.__dict__[name]
