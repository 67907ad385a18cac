"""Gradients of many replicas at once: a model mapped over the rows of stacked parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.simulate.dropout import OwnDropout
from thinwire.simulate.recording import Outputs, Recorder
from thinwire.simulate.stand_ins import with_stand_ins

Carried = tuple[Tensor, ...] | None
Model = Callable[..., Any]
Loss = Callable[[Model, Tensor, Tensor, Carried], tuple[Tensor, Carried]]
"""From a model, inputs, targets and what the last batch has carried over: the loss, and what to carry on."""
Rows = slice | list[int]
"""Which replicas; a slice takes them as they lie, a list copies them."""


class Mapped:
    """A model whose parameters and buffers, by name, are rows of stacked ones."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        trainable: Sequence[str],
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._model = with_stand_ins(deepcopy(model))
        self._dropouts = [m for m in self._model.modules() if isinstance(m, OwnDropout)]
        self._loss, self._trainable = loss, trainable
        self._parameters, self._buffers = parameters, buffers
        self.recorder = Recorder()

    def learn(
        self, rows: Rows, inputs: Sequence[Tensor], generators: list[torch.Generator]
    ) -> tuple[Tensor, Outputs, list[Tensor]]:
        """Losses, gradients and what is carried on, stacked; the next call may overwrite them.

        `inputs`: inputs, targets and what was carried over, stacked too. A parameter that forward does not
        use has no gradient. Buffers are changed in place.
        """
        for dropout in self._dropouts:
            dropout.generators = generators
        compute = partial(self._compute, rows)
        if isinstance(rows, slice):
            outputs = self.recorder.run((rows.start, rows.stop), compute, inputs)
        else:
            outputs = compute(inputs)
        losses, carried = outputs[0], outputs[1 + len(self._trainable) :]
        assert losses is not None
        return losses, outputs[1 : 1 + len(self._trainable)], [part for part in carried if part is not None]

    def _compute(self, rows: Rows, inputs: Sequence[Tensor]) -> Outputs:
        parameters = {name: stacked[rows].detach() for name, stacked in self._parameters.items()}
        learnt = [parameters[name].requires_grad_() for name in self._trainable]
        buffers = {name: stacked[rows] for name, stacked in self._buffers.items()}

        def one(own: Any, own_buffers: Any, inputs: Tensor, targets: Tensor, carried: Any) -> Any:
            def model(*args: Any) -> Any:
                return torch.func.functional_call(self._model, (own, own_buffers), args)

            loss, after = self._loss(model, inputs, targets, carried or None)
            return loss, after or ()  # vmap takes no None

        losses, carried = torch.func.vmap(one)(parameters, buffers, inputs[0], inputs[1], tuple(inputs[2:]))
        gradients: Outputs = torch.autograd.grad(losses.sum(), learnt, allow_unused=True)
        if not isinstance(rows, slice):
            for name, stacked in self._buffers.items():
                stacked[rows] = buffers[name]
        # Laid out as the parameters are: else everything done with them takes the long way.
        even = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        return (losses.detach(), *even, *carried)
