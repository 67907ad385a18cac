"""What layers of torch do with the units that enter them, and which units they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from thinwire.apoptosis.calls import tensors_in
from thinwire.apoptosis.labels import Labels, spread
from thinwire.apoptosis.units import Consumer

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
LEAVES = (nn.Linear, *_CONVOLUTIONS, *_BATCH_NORMS, *_RECURRENT, nn.Embedding, nn.LayerNorm, nn.GroupNorm)


def follow(labels: Labels, name: str, module: nn.Module, given: Sequence[Tensor], result: Any) -> None:
    """Label what a layer has computed; `given`: all tensors that it was called with."""
    known = all(id(p) in labels.names for p in module.parameters(recurse=False))
    if not known or not given:
        labels.touch(given, f"{name} is not understood")
    elif isinstance(module, nn.Linear):
        _layer(labels, name, module, given[0], result, -1)
    elif isinstance(module, _CONVOLUTIONS):
        _convolution(labels, name, module, given[0], result)
    elif isinstance(module, _BATCH_NORMS):
        _batch_norm(labels, name, module, given[0], result)
    elif isinstance(module, nn.Embedding):
        _embedding(labels, name, module, result)
    elif isinstance(module, _RECURRENT):
        _recurrent(labels, name, module, given, result)
    else:
        _statistics(labels, name, module, given[0], result)


def _layer(
    labels: Labels, name: str, module: nn.Linear | nn.Module, given: Tensor, result: Tensor, dim: int
) -> None:
    """A dense layer or a convolution without groups."""
    weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
    key, units = labels.names[id(weight)], labels.units
    padding = getattr(module, "padding", 0)
    zeros = getattr(module, "padding_mode", "zeros") == "zeros"
    pads = zeros and (padding == "same" or (not isinstance(padding, str) and any(_numbers(padding))))
    if (entering := labels.entering(name, given, dim)) is not None:
        units.lie((key, 1), entering, "out")
    elif given not in labels and (key, 1) in units.places:
        units.freeze_tensor(key, f"{name} also reads other data")
    units.consumers.setdefault(
        key, Consumer(module=name, weight=key, bias=labels.name(bias), padded=bool(pads))
    )
    units.layers.setdefault(key, name)
    new = units.fresh(weight.shape[0])
    units.lie((key, 0), new, "in")
    if bias is not None:
        units.lie((labels.names[id(bias)], 0), new, "along")
    label = spread(units.places[key, 0], dim % result.dim(), result.shape)
    labels.set(result, label, made_by=key)


def _convolution(labels: Labels, name: str, module: nn.Module, given: Tensor, result: Tensor) -> None:
    weight, groups = module.get_parameter("weight"), int(getattr(module, "groups", 1))
    dim = -(weight.dim() - 1)
    if groups == 1:
        _layer(labels, name, module, given, result, dim)
        return
    entering = labels.entering(name, given, dim)
    if groups != weight.shape[0] or weight.shape[1] != 1 or entering is None:
        labels.touch([given, weight], f"{name} is a convolution in groups")
        return
    labels.units.lie((labels.names[id(weight)], 0), entering, "along")
    if (bias := getattr(module, "bias", None)) is not None:
        labels.units.lie((labels.names[id(bias)], 0), entering, "along")
    labels.units.happens("depthwise", entering)
    labels.set(result, spread(entering, dim % result.dim(), result.shape))


def _batch_norm(labels: Labels, name: str, module: nn.Module, given: Tensor, result: Tensor) -> None:
    if (entering := labels.entering(name, given, 1)) is None:
        return
    for key in ("weight", "bias", "running_mean", "running_var"):
        if (tensor := getattr(module, key)) is not None:
            labels.units.lie((labels.names[id(tensor)], 0), entering, "along")
    made_by = labels.made_by(given)
    if made_by is not None and module.running_mean is not None:
        labels.units.norms[made_by] = name
        labels.units.consumers[made_by] = replace(labels.units.consumers[made_by], norm=name)
    else:
        labels.units.happens("batch_norm", entering)
    labels.set(result, spread(entering, 1, result.shape))


def _statistics(labels: Labels, name: str, module: nn.Module, given: Tensor, result: Tensor) -> None:
    """Layer and group norm: what they do to one neuron depends on the others."""
    labels.freeze(given, f"{name} ({type(module).__name__}) takes a mean over it and its neighbours")


def _embedding(labels: Labels, name: str, module: nn.Embedding, result: Tensor) -> None:
    if module.max_norm is not None:
        return
    key = labels.names[id(module.weight)]
    labels.units.layers.setdefault(key, name)
    labels.units.lie((key, 1), labels.units.fresh(module.embedding_dim), "in")
    labels.set(result, spread(labels.units.places[key, 1], result.dim() - 1, result.shape))


def _recurrent(labels: Labels, name: str, module: nn.RNNBase, given: Sequence[Tensor], result: Any) -> None:
    if module.proj_size or not isinstance(result[0], Tensor):
        labels.touch([*given, *module.parameters()], f"{name} has projections or packed sequences")
        return
    gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
    units, own = labels.units, labels.units.fresh(module.hidden_size)
    entering, sides = labels.entering(name, given[0], -1), 1 + module.bidirectional
    for layer in range(module.num_layers):
        for suffix in ("", "_reverse")[:sides]:
            into, over = (getattr(module, f"weight_{kind}_l{layer}{suffix}") for kind in ("ih", "hh"))
            names = {kind: labels.names[id(each)] for kind, each in (("ih", into), ("hh", over))}
            for kind, key in names.items():
                bias = getattr(module, f"bias_{kind}_l{layer}{suffix}", None)
                units.consumers[key] = Consumer(
                    module=name, weight=key, bias=labels.name(bias), padded=kind == "hh" or layer > 0
                )
                units.layers.setdefault(key, name)
                units.lie((key, 0), own.repeat(gates), "in")
                if bias is not None:
                    units.lie((labels.names[id(bias)], 0), own.repeat(gates), "along")
            if entering is not None:
                units.lie((names["ih"], 1), entering, "out")
            units.lie((names["hh"], 1), own, "out")
        entering = own.repeat(sides)
    if len(given) > 1:
        units.freeze(own, f"the state of {name} is given from outside")
        labels.touch(given[1:], f"it is a state of {name}")
    units.happens("recurrent", own)
    labels.set(result[0], spread(own.repeat(sides), result[0].dim() - 1, result[0].shape))
    for state in tensors_in(result[1]):
        labels.set(state, spread(own, state.dim() - 1, state.shape))


def _numbers(value: int | Sequence[int]) -> Sequence[int]:
    return [value] if isinstance(value, int) else value


def is_plain(module: nn.Module) -> bool:
    """Whether it computes what its class of torch does: no forward of its own, no parametrization."""
    base = next(cls for cls in type(module).__mro__ if cls in LEAVES)
    return type(module).forward is base.forward and not hasattr(module, "parametrizations")
