"""A GradScaler for models with split layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for tensors and DTensors in one optimizer, which torch's own refuses to unscale.

    A gradient that is not finite leaves out the step of all workers: each holds other parts of the model.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups = [{"params": [_own_part(p) for p in group["params"]]} for group in optimizer.param_groups]
        own_parts: Any = SimpleNamespace(param_groups=groups)
        found = super()._unscale_grads_(own_parts, inv_scale, found_inf, allow_fp16)
        if dist.is_initialized():
            for each in found.values():
                dist.all_reduce(each, op=dist.ReduceOp.MAX)
        return found


def _own_part(parameter: Tensor) -> Tensor:
    """A parameter with the gradient's part on this worker, in the same memory."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    part = nn.Parameter(parameter.detach().to_local())  # type: ignore[attr-defined]  # a DTensor, as its gradient
    part.grad = parameter.grad.to_local()
    return part
