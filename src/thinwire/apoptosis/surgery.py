"""The cut, in place: every Parameter stays the same object and gets smaller data.

Gradients and all tensors of the optimizers follow; modules are told their new sizes. Nothing is masked.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.apoptosis.units import Consumer, Group
from thinwire.errors import UsageError

Kept = dict[str, list[Tensor | None]]
"""By name of each tensor that shrinks: the indices left by dimension, None for all."""
_SIZES = {
    nn.Linear: (("out_features", "weight", 0), ("in_features", "weight", 1)),
    nn.Conv1d: (("out_channels", "weight", 0), ("in_channels", "weight", 1)),
    nn.Conv2d: (("out_channels", "weight", 0), ("in_channels", "weight", 1)),
    nn.Conv3d: (("out_channels", "weight", 0), ("in_channels", "weight", 1)),
    nn.BatchNorm1d: (("num_features", "running_mean", 0), ("num_features", "weight", 0)),
    nn.BatchNorm2d: (("num_features", "running_mean", 0), ("num_features", "weight", 0)),
    nn.BatchNorm3d: (("num_features", "running_mean", 0), ("num_features", "weight", 0)),
    nn.Embedding: (("embedding_dim", "weight", 1),),
    nn.RNNBase: (("hidden_size", "weight_hh_l0", 1), ("input_size", "weight_ih_l0", 1)),
}
"""Sizes that modules keep beside their tensors: attribute, tensor, dimension."""


@dataclass(slots=True, kw_only=True)
class Fold:
    """How one consumer makes up for neurons that go: h_j = sum over kept i of c_ji h_i + constant_j."""

    coefficients: Tensor
    """A row for each neuron that goes, a column for each that stays."""
    constants: Tensor


@dataclass(slots=True, kw_only=True)
class Removal:
    """Neurons of one group that go."""

    group: Group
    kept: Tensor
    """Indices of the neurons that stay, in order."""
    folds: dict[str, Fold] = field(default_factory=dict)
    """By the weight of a consumer; one that is missing just loses columns."""
    causes: dict[str, int] = field(default_factory=dict)
    """How many go, and why."""
    change: float = 0.0
    """Bound on the relative change of what consumers compute, root mean square over recent data."""

    @property
    def dropped(self) -> Tensor:
        gone = torch.ones(self.group.size, dtype=torch.bool)
        gone[self.kept] = False
        return gone.nonzero().flatten()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Buffers, then parameters, by the names that `named_buffers` and `named_parameters` give them: in one
    walk, since an event asks dozens of times."""
    buffers, parameters = dict[str, Tensor](), dict[str, Tensor]()
    seen = set[int]()
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for held, found in ((module._buffers, buffers), (module._parameters, parameters)):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[start + name] = tensor
    return buffers | parameters


def kept_indices(model: nn.Module, removals: Iterable[Removal]) -> Kept:
    """What stays of each tensor when all these neurons go at once."""
    tensors = named_tensors(model)
    stays: dict[str, dict[int, Tensor]] = {}
    for removal in removals:
        for (name, dim), indices in removal.group.places.items():
            mask = stays.setdefault(name, {}).setdefault(
                dim, torch.ones(tensors[name].shape[dim], dtype=torch.bool)
            )
            mask[indices[removal.dropped].flatten()] = False
    return {
        name: [masks[dim].nonzero().flatten() if dim in masks else None for dim in range(tensors[name].dim())]
        for name, masks in stays.items()
    }


@torch.no_grad()
def replace_(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other data, of any shape; it stays the same object, with its hooks.

    `tensor.data = data` would leave the node that accumulates its gradient, with the old shape, as long as
    any graph is alive: that of the last loss always is.
    """
    tensor.grad = None  # torch refuses one of another shape
    tensor.set_(data)  # type: ignore[call-overload]


@torch.no_grad()
def fold(model: nn.Module, removals: Iterable[Removal]) -> None:
    """Add to the outgoing weights of neurons that stay what those that go have contributed."""
    tensors = named_tensors(model)
    for removal in removals:
        for name, data in fold_tensors(tensors, removal).items():
            _swap_(tensors[name], data)


def fold_tensors(tensors: Mapping[str, Tensor], removal: Removal) -> dict[str, Tensor]:
    """New values of those of the given tensors, by name, that folding changes."""
    changed: dict[str, Tensor] = {}
    for consumer in removal.group.consumers:
        each = removal.folds.get(consumer.weight)
        if each is None or not len(removal.dropped) or consumer.weight not in tensors:
            continue
        weight, columns = tensors[consumer.weight].detach(), removal.group.columns(consumer)
        exact = torch.promote_types(weight.dtype, torch.float32)
        gone = weight[:, columns[removal.dropped]].to(exact)  # outputs, neurons, columns of each, kernel
        factors = each.coefficients.to(weight.device, exact)
        more = torch.einsum("od...,dk->ok...", gone, factors).to(weight.dtype).flatten(1, 2)
        kept = columns[removal.kept].flatten().to(weight.device)
        changed[consumer.weight] = weight.index_add(1, kept, more)
        if each.constants.any():
            constants = each.constants.to(weight.device, exact)
            shift = torch.einsum("od...,d->o...", gone, constants).flatten(1).sum(1)
            changed |= _shifted(tensors, consumer, shift)
    return changed


def _shifted(tensors: Mapping[str, Tensor], consumer: Consumer, shift: Tensor) -> dict[str, Tensor]:
    assert consumer.takes_constants, "a constant is folded only where it can be"
    # batch norm subtracts its mean: less of it
    name, sign = (consumer.bias, 1.0) if consumer.bias else (f"{consumer.norm}.running_mean", -1.0)
    if name not in tensors:
        return {}
    return {name: tensors[name].detach() + sign * shift.to(tensors[name].dtype)}


def _swap_(tensor: Tensor, data: Tensor) -> None:
    """Other data of the same shape; the gradient stays."""
    grad = tensor.grad
    replace_(tensor, data)
    tensor.grad = grad


def select(data: Tensor, kept: Sequence[Tensor | None], shape: Sequence[int]) -> Tensor:
    """The numbers of a tensor that stay; a dimension that has one number instead of `shape` keeps it."""
    for dim, index in enumerate(kept):
        if index is not None and data.shape[dim] == shape[dim]:
            data = data.index_select(dim, index.to(data.device))
    return data


def check_state(model: nn.Module, optimizers: Iterable[Optimizer], kept: Kept) -> None:
    """Raise UsageError, before anything is changed, for a tensor of an optimizer that cannot follow."""
    tensors = named_tensors(model)
    for optimizer in optimizers:
        for name in kept:
            for key, value in optimizer.state.get(tensors[name], {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and not _fits(value, tensors[name]):
                    raise UsageError(
                        f"{type(optimizer).__name__} keeps {key} of {name} with shape {tuple(value.shape)}, "
                        "which says nothing about single neurons",
                        hint="use an optimizer that keeps its averages by parameter, such as SGD or AdamW",
                    )


def _fits(value: Tensor, parameter: Tensor) -> bool:
    sizes = zip(value.shape, parameter.shape, strict=False)
    return value.dim() == parameter.dim() and all(mine in (1, theirs) for mine, theirs in sizes)


@torch.no_grad()
def cut(model: nn.Module, optimizers: Sequence[Optimizer], kept: Kept) -> None:
    """Shrink tensors, gradients, optimizer state and the sizes that modules know, as `kept` says."""
    tensors = named_tensors(model)
    for name, indices in kept.items():
        tensor = tensors[name]
        shape, grad = tensor.shape, tensor.grad
        replace_(tensor, select(tensor.detach(), indices, shape))
        if grad is not None:
            tensor.grad = select(grad.detach(), indices, shape)
        for optimizer in optimizers:
            state = optimizer.state.get(tensor, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    state[key] = select(value, indices, shape)
    resize_modules(model)


def resize_modules(model: nn.Module) -> None:
    """Have modules say the sizes that their tensors have."""
    for module in model.modules():
        for base, facts in _SIZES.items():
            if isinstance(module, base):
                for attribute, key, dim in facts:
                    tensor = getattr(module, key, None)
                    if tensor is not None and getattr(module, "groups", 1) == 1:
                        setattr(module, attribute, tensor.shape[dim])
                if getattr(module, "groups", 1) > 1 and base is not nn.RNNBase:
                    _resize_depthwise(module)
                if isinstance(module, nn.RNNBase):
                    module.flatten_parameters()


def _resize_depthwise(module: nn.Module) -> None:
    weight = module.get_parameter("weight")
    if weight.shape[1] == 1:
        for attribute in ("groups", "in_channels", "out_channels"):
            setattr(module, attribute, weight.shape[0])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A model and its optimizers' state, to go back to."""

    tensors: dict[str, Tensor]
    states: list[dict[str, dict[str, Any]]]

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], replaced: Container[str] = ()) -> Snapshot:
        """`replaced`: tensors whose data a cut is about to replace; what they have now need not be copied."""

        tensors = named_tensors(model)

        def own(name: str, value: Tensor) -> Tensor:
            stays = name in replaced and value.shape == tensors[name].shape
            return value.detach() if stays else value.detach().clone()

        states = [
            {
                name: {k: own(name, v) if isinstance(v, Tensor) else v for k, v in state.items()}
                for name, p in model.named_parameters()
                if (state := optimizer.state.get(p))
            }
            for optimizer in optimizers
        ]
        return cls({name: own(name, t) for name, t in tensors.items()}, states)

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take over the copies; a snapshot is used once. Gradients are gone: they are of another shape."""
        tensors = named_tensors(model)
        for name, data in self.tensors.items():
            replace_(tensors[name], data)
        for optimizer, state in zip(optimizers, self.states, strict=True):
            for name, values in state.items():
                optimizer.state[tensors[name]] = values
        resize_modules(model)
