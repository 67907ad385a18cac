"""Group lasso: neurons that the loss does not need lose their incoming weights (as PruneTrain does, 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.apoptosis.criteria import row_norms
from thinwire.apoptosis.surgery import named_tensors
from thinwire.apoptosis.units import Group

EVERY = 10
"""Steps between two applications, each as strong as so many: the norms cost a pass over all weights."""


class GroupLasso:
    """The proximal step of `strength` * sum over neurons of |u_j|."""

    def __init__(self, strength: float, optimizers: Sequence[Optimizer]) -> None:
        self._strength, self._optimizers = strength, optimizers

    def is_due(self, steps: int) -> bool:
        return steps % EVERY == 0

    @torch.no_grad()
    def apply_(self, model: nn.Module, groups: Sequence[Group]) -> None:
        """Shrink the incoming weights of every neuron, in their norm, by learning rate * strength * EVERY."""
        tensors = named_tensors(model)
        rate = max(float(group["lr"]) for each in self._optimizers for group in each.param_groups)
        for group in groups:
            if group.frozen:
                continue
            norms = row_norms(tensors, group)
            factors = (1.0 - rate * self._strength * EVERY / norms.clamp_min(1e-30)).clamp_min(0.0)
            for (name, dim), roles in group.roles.items():
                if "in" in roles and tensors[name].requires_grad:
                    indices = group.places[name, dim].to(tensors[name].device)
                    scale = torch.ones(
                        tensors[name].shape[dim], device=indices.device, dtype=tensors[name].dtype
                    )
                    scale[indices] = factors[:, None].to(scale).expand_as(indices)
                    tensors[name].mul_(
                        scale.view([-1 if d == dim else 1 for d in range(tensors[name].dim())])
                    )
