"""Steps under a GradScaler, where a strategy mixes parameters and so waits for the steps of others.

A GradScaler leaves out the step of a worker whose gradients are not finite. There it would be one step behind
all others, for good. Optimizers that say so are called also then, and told to do nothing; those that a link
holds say so as long as it is attached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_CALLS_ALWAYS = "_step_supports_amp_scaling"
"""The attribute by which a GradScaler knows them (torch's fused optimizers have it). It then sets `found_inf`
for the time of a step, and `grad_scale` unless it has unscaled the gradients already."""


class ScaledSteps:
    """Makes a step without gradients of one that a GradScaler would leave out, and unscales the others."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._mine = [each for each in optimizers if not getattr(each, _CALLS_ALWAYS, False)]
        self._handles: list[RemovableHandle] = []
        self._kept: list[tuple[Tensor, Tensor]] = []
        for optimizer in self._mine:
            setattr(optimizer, _CALLS_ALWAYS, True)
            self._handles.append(optimizer.register_step_pre_hook(self._begins))
            self._handles.append(optimizer.register_step_post_hook(self._ended))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        for optimizer in self._mine:
            vars(optimizer).pop(_CALLS_ALWAYS, None)

    @torch.no_grad()
    def _begins(self, optimizer: Optimizer, *_: Any) -> None:
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is None:
            return  # nobody scales
        optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]  # done here
        held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if float(found_inf):
            self._kept = [(p, p.grad) for p in held]
            for p in held:
                p.grad = None
        elif scale is not None:
            for p in held:
                p.grad.div_(scale.to(p.grad.device))

    def _ended(self, *_: Any) -> None:
        for p, gradient in self._kept:
            p.grad = gradient
        self._kept = []
