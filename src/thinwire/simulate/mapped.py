"""Gradients of many replicas at once: a model mapped over the rows of stacked parameters.

On a GPU the computation is recorded once and played again, one launch instead of thousands: models of a study
are small, so that launching their kernels one by one takes longer than running them. Modules that cannot be
mapped over replicas as they are, or only slowly, get stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

MOST_RECORDINGS = 8
"""Largest number of recordings: each holds on to the memory of its activations."""

Outputs = tuple[Tensor | None, ...]
Carried = tuple[Tensor, ...] | None
Model = Callable[..., Any]
Loss = Callable[[Model, Tensor, Tensor, Carried], tuple[Tensor, Carried]]
"""From a model, inputs, targets and what the last batch has carried over: the loss, and what to carry on."""
Stacked = Mapping[str, Tensor]
Rows = slice | list[int]
"""Which replicas; a slice takes them as they lie, a list copies them."""


class Mapped:
    """A model whose parameters and buffers, by name, are rows of stacked ones."""

    def __init__(
        self, model: nn.Module, loss: Loss, trainable: Sequence[str], parameters: Stacked, buffers: Stacked
    ) -> None:
        self._model = deepcopy(model)
        _replace_modules_(self._model)
        self._dropouts = [m for m in self._model.modules() if isinstance(m, OwnDropout)]
        self._loss, self._trainable = loss, trainable
        self._parameters, self._buffers = parameters, buffers
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, tuple[torch.cuda.CUDAGraph, Sequence[Tensor], Outputs]] = {}
        self._records = True

    def learn(
        self, rows: Rows, inputs: Sequence[Tensor], generators: list[torch.Generator]
    ) -> tuple[Tensor, Outputs, list[Tensor]]:
        """Losses, gradients and what is carried on, stacked; the next call may overwrite them.

        `inputs`: inputs, targets and what was carried over, stacked too. A parameter that forward does not
        use has no gradient. Buffers are changed in place.
        """
        for dropout in self._dropouts:
            dropout.generators = generators
        outputs = self._play(rows, inputs) if isinstance(rows, slice) else self._compute(rows, inputs)
        losses, carried = outputs[0], outputs[1 + len(self._trainable) :]
        assert losses is not None
        return losses, outputs[1 : 1 + len(self._trainable)], [part for part in carried if part is not None]

    def _compute(self, rows: Rows, inputs: Sequence[Tensor]) -> Outputs:
        """Read and write, besides inputs, only tensors that stay where they are: this may be recorded."""
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

    def _play(self, rows: slice, inputs: Sequence[Tensor]) -> Outputs:
        """Play the recording of this computation; make one when it comes again."""
        key = (rows.start, rows.stop, *((tensor.shape, tensor.dtype) for tensor in inputs))
        if key not in self._recordings and not self._record(key, rows, inputs):
            return self._compute(rows, inputs)
        graph, own_inputs, outputs = self._recordings[key]
        for own, given in zip(own_inputs, inputs, strict=True):
            own.copy_(given)
        graph.replay()
        return outputs

    def _record(self, key: Hashable, rows: slice, inputs: Sequence[Tensor]) -> bool:
        """Record a computation on its second run: at first libraries choose kernels, which would fail."""
        if not inputs[0].is_cuda or not self._records or len(self._recordings) == MOST_RECORDINGS:
            return False
        if key not in self._seen:
            self._seen.add(key)
            return False
        own, graph = [torch.empty_like(tensor) for tensor in inputs], torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._recordings[key] = graph, own, self._compute(rows, own)
        except RuntimeError:  # the computation has to ask the device for a number
            self._recordings.pop(key, None)
            self._records = False
        return self._records


def _replace_modules_(model: nn.Module) -> None:
    """Replace layers by their stand-ins; parameters keep their names."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, OwnDropout(child.p).train(child.training))
            elif type(child) is nn.LSTM and OwnLSTM.fits(child):
                setattr(module, name, OwnLSTM(child).train(child.training))


class _Mask(torch.autograd.Function):
    """What dropout multiplies with, by replica; only under vmap. Nothing flows back through it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dropout: OwnDropout) -> tuple[Tensor, int]:
        return dropout.draw(x.detach().movedim(in_dims[0], 0)), 0


class OwnDropout(nn.Module):
    """Stands in for `nn.Dropout`: each replica draws from its own generator.

    torch's own vmap would draw for all replicas in one go, so that what one of them gets would depend on who
    else is computed with it. On the CPU the numbers are those that `nn.Dropout` would draw in a process whose
    generator stands where the replica's stands.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.keep = 1.0 - p
        self.generators: list[torch.Generator] = []
        """Generators of the replicas that are computed now, in order."""

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


class _Cell(torch.autograd.Function):
    """One step of many replicas, only under vmap; gradients flow through what `vmap` calls."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *parts: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        rows = [part.movedim(dim, 0) for part, dim in zip(parts, in_dims, strict=True)]
        flat = [row.reshape(-1, row.shape[-1]) for row in rows]
        if flat[0].is_cuda:
            hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(*flat)
        else:
            into, keep, new, out = (flat[0] + flat[1]).chunk(4, dim=-1)
            cell = keep.sigmoid() * flat[2] + into.sigmoid() * new.tanh()
            hidden = out.sigmoid() * cell.tanh()
        return (hidden.view_as(rows[2]), cell.view_as(rows[2])), (0, 0)


class OwnLSTM(nn.LSTM):
    """Stands in for `nn.LSTM`, one direction without projection."""

    @staticmethod
    def fits(lstm: nn.LSTM) -> bool:
        # Worth it on a GPU, where torch's own is a library call for each replica, one after another.
        return next(lstm.parameters()).is_cuda and not lstm.bidirectional and lstm.proj_size == 0

    def __init__(self, like: nn.LSTM) -> None:
        super().__init__(like.input_size, like.hidden_size, like.num_layers, like.bias, like.batch_first)
        self.between = OwnDropout(like.dropout)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        """As `nn.LSTM` does; the first input has a batch."""
        x = x.transpose(0, 1) if self.batch_first else x
        if state is None:
            state = (x.new_zeros(self.num_layers, x.shape[1], self.hidden_size),) * 2
        ends = []
        for layer, start in enumerate(zip(*state, strict=True)):
            x, *end = self._layer(layer, x if layer == 0 else self.between(x), *start)
            ends.append(end)
        x = x.transpose(0, 1) if self.batch_first else x
        hiddens, cells = map(torch.stack, zip(*ends, strict=True))
        return x, (hiddens, cells)

    def _layer(self, layer: int, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if self.bias else 2]
        w_in, w_hidden, *biases = (getattr(self, f"{name}_l{layer}") for name in names)
        gates = sum(biases, x @ w_in.T)
        outputs = []
        for at_once in gates.unbind():
            hidden, cell = _Cell.apply(at_once, hidden @ w_hidden.T, cell)  # type: ignore[no-untyped-call]
            outputs.append(hidden)
        return torch.stack(outputs), hidden, cell
