"""Modules that cannot be mapped over replicas as they are, and what stands in for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def with_stand_ins(model: nn.Module) -> nn.Module:
    """The same model, to be mapped: layers are replaced in place, their parameters keep their names."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, OwnDropout(child.p).train(child.training))
            elif type(child) is nn.LSTM and _can_stand_in(child):
                setattr(module, name, OwnLSTM(child).train(child.training))
    return model


def _can_stand_in(lstm: nn.LSTM) -> bool:
    """Whether an OwnLSTM does the same, and faster."""
    return next(lstm.parameters()).is_cuda and not lstm.bidirectional and lstm.proj_size == 0


class _Mask(torch.autograd.Function):
    """What dropout multiplies with, by replica; only under vmap. Nothing flows back through it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, dropout: OwnDropout) -> tuple[Tensor, int]:
        return dropout.draw(x.detach().movedim(in_dims[0], 0)), 0


class OwnDropout(nn.Module):
    """Stands in for `nn.Dropout` in a model that is mapped over replicas: each draws from its own generator.

    torch's own vmap would draw for all replicas in one go, so that what one of them gets would depend on who
    else is computed with it. On the CPU the numbers are those that `nn.Dropout` would draw in a process whose
    generator stands where the replica's stands.
    """

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
    """Stands in for `nn.LSTM`, one direction without projection, in a model that is mapped over replicas.

    Worth it on a GPU, where torch's own is a library call for each replica, one after another.
    """

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
