"""Steps a user's optimizer for some of its parameters at a time, with the settings of the whole step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from thinwire.engine.buckets import ParameterBucket
from thinwire.errors import UsageError

_ELSE = "use AllReduce(overlap='backward')"


class PartialOptimizer:
    """Records what `optimizer.step()` would do now, and does it bucket by bucket later.

    The optimizer's own step is called with parameter groups cut down to one bucket, so whatever
    it computes for a parameter it computes here. That holds for optimizers that treat each
    parameter by itself, as all of torch.optim but LBFGS do.
    """

    def __init__(self, optimizer: Optimizer) -> None:
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
            ({key: _copy(v) for key, v in group.items() if key != "params"}, {id(p) for p in group["params"]})
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


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
