"""An LSTM that can be mapped over replicas; torch's own cannot.

Worth it on a GPU, where torch's own is a library call for each replica, one after another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.simulate.dropout import OwnDropout


class _Cell(torch.autograd.Function):
    """One step of many replicas; gradients flow through what `vmap` calls."""

    @staticmethod
    def forward(gates: Tensor, more_gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError("only under vmap")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *parts: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        rows = [part.movedim(dim, 0) for part, dim in zip(parts, in_dims, strict=True)]
        flat = [row.reshape(-1, row.shape[-1]) for row in rows]
        hidden, cell = _fused(*flat) if flat[0].is_cuda else _plain(*flat)
        return (hidden.view_as(rows[2]), cell.view_as(rows[2])), (0, 0)


def _fused(gates: Tensor, more_gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    hidden, after, _ = torch.ops.aten._thnn_fused_lstm_cell(gates, more_gates, cell)
    return hidden, after


def _plain(gates: Tensor, more_gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    into, keep, new, out = (gates + more_gates).chunk(4, dim=-1)
    after = keep.sigmoid() * cell + into.sigmoid() * new.tanh()
    return out.sigmoid() * after.tanh(), after


class OwnLSTM(nn.LSTM):
    """Stands in for `nn.LSTM` in a model that is mapped over replicas; one direction, no projection."""

    def __init__(self, like: nn.LSTM) -> None:
        super().__init__(
            like.input_size,
            like.hidden_size,
            num_layers=like.num_layers,
            bias=like.bias,
            batch_first=like.batch_first,
        )
        self.between = OwnDropout(like.dropout)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        """As `nn.LSTM` does; the first input has a batch."""
        x = x.transpose(0, 1) if self.batch_first else x
        if state is None:
            state = (x.new_zeros(self.num_layers, x.shape[1], self.hidden_size),) * 2
        hiddens, cells = [], []
        for layer, (hidden, cell) in enumerate(zip(*state, strict=True)):
            x = x if layer == 0 else self.between(x)
            x, hidden, cell = self._layer(layer, x, hidden, cell)
            hiddens.append(hidden)
            cells.append(cell)
        x = x.transpose(0, 1) if self.batch_first else x
        return x, (torch.stack(hiddens), torch.stack(cells))

    def _layer(self, layer: int, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if self.bias else 2]
        w_in, w_hidden, *biases = (getattr(self, f"{name}_l{layer}") for name in names)
        gates = sum(biases, x @ w_in.T)
        outputs = []
        for at_once in gates.unbind():
            hidden, cell = _Cell.apply(at_once, hidden @ w_hidden.T, cell)  # type: ignore[no-untyped-call]
            outputs.append(hidden)
        return torch.stack(outputs), hidden, cell


def can_stand_in(lstm: nn.LSTM) -> bool:
    """Whether an OwnLSTM does the same, and faster."""
    return next(lstm.parameters()).is_cuda and not lstm.bidirectional and lstm.proj_size == 0
