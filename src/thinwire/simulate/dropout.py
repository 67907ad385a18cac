"""Dropout under vmap in which every replica draws from a generator of its own.

torch's own vmap would draw for all replicas in one go, so that what one of them gets would depend on
who else is computed with it. On the CPU the numbers are those that `nn.Dropout` would draw in a process
whose generator stands where the replica's stands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _Mask(torch.autograd.Function):
    """What dropout multiplies with, by replica; nothing flows back through it."""

    @staticmethod
    def forward(x: Tensor, dropout: OwnDropout) -> Tensor:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dropout: OwnDropout) -> tuple[Tensor, int]:
        own = x.detach().movedim(in_dims[0], 0)
        return dropout.draw(own), 0


class OwnDropout(nn.Module):
    """Stands in for `nn.Dropout` in a model that is mapped over replicas."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.keep = 1.0 - p
        self.generators: list[torch.Generator] = []
        """Of the replicas that are computed now, in order."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep == 1.0:
            return x
        mask: Tensor = _Mask.apply(x, self)  # type: ignore[no-untyped-call]
        return x * mask

    def draw(self, x: Tensor) -> Tensor:
        """Zeros and 1 / keep, for inputs stacked by replica."""
        mask = torch.empty_like(x)
        if mask.is_cpu:
            for row, generator in zip(mask, self.generators, strict=True):
                row.bernoulli_(self.keep, generator=generator)
        else:
            mask.bernoulli_(self.keep)  # a launch for each replica would cost more than the layer
        return mask.div_(self.keep)


def with_own_dropout(model: nn.Module) -> nn.Module:
    """The same model, its `nn.Dropout` layers replaced in place."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                stand_in = OwnDropout(child.p)
                stand_in.train(child.training)
                setattr(module, name, stand_in)
    return model
