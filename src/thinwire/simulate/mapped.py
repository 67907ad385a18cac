"""Gradients of many replicas at once: a model mapped over the rows of stacked parameters.

On a GPU the computation is recorded once and played again, one launch instead of thousands: models of a study
are small, so that launching their kernels one by one takes longer than running them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.simulate.stand_ins import OwnDropout, with_stand_ins

MOST_RECORDINGS = 8
"""Each holds on to the memory of its activations."""

Outputs = tuple[Tensor | None, ...]
Computation = Callable[[Sequence[Tensor]], Outputs]
"""May read and write, besides its inputs, only tensors that stay where they are."""
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


class Recorder:
    """Plays computations of which it has a recording, and makes one when a computation comes again."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, tuple[torch.cuda.CUDAGraph, Sequence[Tensor], Outputs]] = {}
        self.refusal = ""
        """Why nothing is recorded, in torch's words."""

    def run(self, what: Hashable, compute: Computation, inputs: Sequence[Tensor]) -> Outputs:
        """What `compute` gives; `what` names it, so far as its inputs' shapes do not tell.

        The next call may overwrite it.
        """
        key = (what, tuple((tensor.shape, tensor.dtype) for tensor in inputs))
        if key not in self._recordings and not self._record(key, compute, inputs):
            return compute(inputs)
        graph, own_inputs, outputs = self._recordings[key]
        for own, given in zip(own_inputs, inputs, strict=True):
            own.copy_(given)
        graph.replay()
        return outputs

    def _record(self, key: Hashable, compute: Computation, inputs: Sequence[Tensor]) -> bool:
        """Not the first time: libraries choose their kernels then, which cannot be recorded."""
        if not inputs[0].is_cuda or self.refusal or len(self._recordings) == MOST_RECORDINGS:
            return False
        if key not in self._seen:
            self._seen.add(key)
            return False
        own, graph = [torch.empty_like(tensor) for tensor in inputs], torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._recordings[key] = graph, own, compute(own)
        except RuntimeError as error:  # the computation has to ask the device for a number
            self._recordings.pop(key, None)
            self.refusal = str(error).split("\n", 1)[0]
        return not self.refusal
