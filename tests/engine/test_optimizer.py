"""Which optimizers make steps that are as long for noisy gradients as for clean ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from thinwire.engine.optimizer import is_normalised

WORKERS = 4


class Lars(Optimizer):
    """Each layer's step is as long as a part of its weights (You et al., 2017), without momentum."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, weight_decay: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            decay = group["weight_decay"]
            for parameter in group["params"]:
                size, gradient_size = parameter.norm(), parameter.grad.norm()
                step = parameter.grad + decay * parameter
                parameter -= group["lr"] * size / (gradient_size + decay * size) * step


class LARSWrapper(Lars):
    """Named as others name theirs."""


def step_with(kind: type[Optimizer], gradient: Tensor) -> Tensor:
    parameter = torch.linspace(-1, 1, gradient.numel()).requires_grad_()
    before = parameter.detach().clone()
    optimizer = kind([parameter], lr=0.01)  # type: ignore[call-arg]
    parameter.grad = gradient
    optimizer.step()
    return parameter.detach() - before


@pytest.mark.parametrize("kind", [Adam, Lars, LARSWrapper, SGD])
def test_steps_are_normalised_where_their_mean_is_too_short(kind: type[Optimizer]) -> None:
    """Of four workers, whose gradients are hardly more than noise: the mean of their steps is about half as
    long as the step along their mean gradient, unless steps grow with the gradient."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(WORKERS, 1000, generator=generator)
    together = step_with(kind, gradients.mean(0)).norm()
    mean = torch.stack([step_with(kind, gradient) for gradient in gradients]).mean(0).norm()
    normalised = is_normalised(kind([torch.zeros(1, requires_grad=True)], lr=0.1))  # type: ignore[call-arg]
    assert normalised == (kind is not SGD)
    expected = WORKERS**-0.5 if normalised else 1.0
    assert float(mean / together) == pytest.approx(expected, abs=0.05)
    longer = step_with(kind, 10 * gradients[0]).norm() / step_with(kind, gradients[0]).norm()
    assert float(longer) == pytest.approx(1.0 if normalised else 10.0, rel=0.01)
