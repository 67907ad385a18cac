"""LSTMs whose input projections are split: the gates of all time steps come from one split matrix product.

Only the projection of the input (weight_ih) can be split for little: the recurrent one would send something
in every time step. The recurrence then runs step by step in Python, as torch's fused LSTM takes no
precomputed gates.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from thinwire.errors import UsageError
from thinwire.parallel.activations import ActivationGroup
from thinwire.parallel.batches import EqualBatches
from thinwire.parallel.styles import group_of, split_, strip_widths

State = tuple[Tensor, Tensor]


class BatchColwiseLSTM(ParallelStyle):
    """Split the input projections of an `nn.LSTM` by gates; own rows go in and out."""

    def __init__(self, name: str = "layer", batches: EqualBatches | None = None) -> None:
        self.name, self.batches = name, batches

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.LSTM)
        group = group_of(device_mesh, self.name, self.batches)
        for layer in range(module.num_layers):
            for key in (f"weight_ih_l{layer}", f"bias_ih_l{layer}")[: 1 + module.bias]:
                split_(module, key, device_mesh, Shard(0), self.src_data_rank)
        module.forward = partial(_forward, module, group)  # type: ignore[method-assign,assignment]  # instance only
        return module


def _forward(
    lstm: nn.LSTM, group: ActivationGroup, input: Tensor, hx: State | None = None
) -> tuple[Tensor, State]:
    if getattr(input, "ndim", None) != 3:
        raise UsageError(
            f"{group.layer}: a split LSTM takes a tensor of 3 dimensions, got a {type(input).__name__}",
            hint="pad sequences instead of packing them, and add a batch dimension",
        )
    x = input if lstm.batch_first else input.transpose(0, 1)
    batch, outputs = len(x), lstm.proj_size or lstm.hidden_size
    if hx is None:
        hx = (
            x.new_zeros(lstm.num_layers, batch, outputs),
            x.new_zeros(lstm.num_layers, batch, lstm.hidden_size),
        )
    ends: list[State] = []
    for layer in range(lstm.num_layers):
        if layer and lstm.dropout:
            x = functional.dropout(x, lstm.dropout, lstm.training)
        x, end = _recur(lstm, layer, _gates(lstm, group, layer, x), (hx[0][layer], hx[1][layer]))
        ends.append(end)
    out = x if lstm.batch_first else x.transpose(0, 1)
    return out, (torch.stack([h for h, _ in ends]), torch.stack([c for _, c in ends]))


def _gates(lstm: nn.LSTM, group: ActivationGroup, layer: int, x: Tensor) -> Tensor:
    """What the input adds to the gates, for own rows and all time steps."""
    bias = _local(lstm, f"bias_ih_l{layer}") if lstm.bias else None
    strip = functional.linear(group.gather_rows(x), _local(lstm, f"weight_ih_l{layer}"), bias)
    return group.strip_to_rows(strip, strip_widths(4 * lstm.hidden_size, group.size))


def _recur(lstm: nn.LSTM, layer: int, gates: Tensor, state: State) -> tuple[Tensor, State]:
    h, c = state
    weight: Any = getattr(lstm, f"weight_hh_l{layer}")
    bias = getattr(lstm, f"bias_hh_l{layer}") if lstm.bias else None
    project = getattr(lstm, f"weight_hr_l{layer}") if lstm.proj_size else None
    steps = []
    for into in gates.unbind(1):
        i, f, g, o = (into + functional.linear(h, weight, bias)).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        h = h if project is None else functional.linear(h, project)
        steps.append(h)
    return torch.stack(steps, dim=1), (h, c)


def _local(lstm: nn.LSTM, key: str) -> Tensor:
    parameter = getattr(lstm, key)
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
