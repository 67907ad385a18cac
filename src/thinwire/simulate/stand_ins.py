"""Modules that cannot be mapped over replicas as they are, and what stands in for them."""

from __future__ import annotations

from torch import nn

from thinwire.simulate.dropout import OwnDropout
from thinwire.simulate.lstm import OwnLSTM, can_stand_in


def with_stand_ins(model: nn.Module) -> nn.Module:
    """The same model, to be mapped: layers are replaced in place, their parameters keep their names."""
    for module in model.modules():
        for name, child in module.named_children():
            stand_in: nn.Module | None = None
            if type(child) is nn.Dropout:
                stand_in = OwnDropout(child.p)
            elif type(child) is nn.LSTM and can_stand_in(child):
                stand_in = OwnLSTM(child)
            if stand_in is not None:
                setattr(module, name, stand_in.train(child.training))
    return model
