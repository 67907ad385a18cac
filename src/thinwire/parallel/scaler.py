"""A GradScaler for models with split layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.errors import UsageError


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for tensors and DTensors in one optimizer, which torch's own refuses to unscale.

    A gradient that is not finite leaves out the step of all workers: each holds other parts of the model.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        split = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
        if split and all(p.grad is None for p in split):
            raise UsageError(
                "no split layer has a gradient to unscale",
                hint="overlap='forward' has them after the step: use AllReduce(overlap='backward')",
            )
        groups = [{"params": [_own_part(p) for p in group["params"]]} for group in optimizer.param_groups]
        own_parts: Any = SimpleNamespace(param_groups=groups)
        found = super()._unscale_grads_(own_parts, inv_scale, found_inf, allow_fp16)
        if dist.is_initialized():
            for each in found.values():
                dist.all_reduce(each, op=dist.ReduceOp.MAX)
        return found


def _own_part(parameter: Tensor) -> Tensor:
    """A parameter with the part of its gradient that is on this worker, in the same memory."""
    if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
        return parameter
    part = nn.Parameter(parameter.to_local().detach())
    part.grad = parameter.grad.to_local()
    return part
