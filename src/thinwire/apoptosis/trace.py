"""Follows neurons through one forward pass of a model, and finds the groups that can be cut.

Every output of a layer gets a number, its label, kept in a tensor of the same shape beside it. Operations
that only move numbers are applied to labels too; those that combine numbers make their labels one; whatever
else is met freezes its inputs, by name. So what is not understood is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thinwire.apoptosis.operations import BINARY, MOVES, POOLS, READS, UNARY, kind_of
from thinwire.apoptosis.units import Consumer, Group, Units

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
_LEAVES = (nn.Linear, *_CONVOLUTIONS, *_BATCH_NORMS, *_RECURRENT, nn.Embedding, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copy(self) -> Call:
        return self.map(lambda t: t.detach().clone())

    def first(self, rows: int) -> Call:
        """The same call with fewer samples."""
        return self.map(lambda t: t[:rows] if t.dim() else t)

    def map(self, change: Callable[[Tensor], Tensor]) -> Call:
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    def rows(self) -> int:
        """Samples in it."""
        return next((len(t) for t in tensors_in((self.args, self.kwargs)) if t.dim()), 0)

    def run(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """In here the model is in evaluation mode; modes and random numbers are as before after it."""
    training = [module for module in model.modules() if module.training]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def trace(model: nn.Module, call: Call) -> list[Group]:
    """The groups of a model's neurons, found with the first samples of a call; some of them frozen."""
    with undisturbed(model):
        tracer = _Tracer(model)
        try:
            tracer.run(call.first(2))
        except Exception:  # noqa: BLE001 (it may need its whole batch; then an error is the model's own)
            tracer = _Tracer(model)
            tracer.run(call)
    return tracer.units.groups()


def _along(label: Tensor) -> tuple[int, Tensor] | None:
    """The one dimension along which a label varies, and the units along it."""
    for dim in range(label.dim()):
        ids = label.select(dim, 0).new_empty(label.shape[dim])
        first = label
        for other in reversed(range(label.dim())):
            if other != dim:
                first = first.select(other, 0)
        ids = first
        shape = [1] * label.dim()
        shape[dim] = -1
        if bool((label == ids.view(shape)).all()):
            return dim, ids
    return None


def _spread(ids: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    view = [1] * len(shape)
    view[dim] = -1
    return ids.view(view).expand(list(shape))


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """All tensors in what a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (t for each in value.values() for t in tensors_in(each, depth))
    elif isinstance(value, list | tuple | set):
        yield from (t for each in value for t in tensors_in(each, depth))
    elif depth and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        yield from (t for each in vars(value).values() for t in tensors_in(each, depth - 1))


class _Tracer(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.units = Units()
        self._model = model
        self._names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        self._modules = dict(model.named_modules())
        self._labels: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []
        """Tensors with a label: their ids must not be used again."""
        self._made_by: dict[int, str] = {}
        """The weight of the layer that a tensor comes from, without anything in between."""
        self._num_uses: dict[int, int] = {}
        self._touched: dict[str, str] = {}
        self._depth = 0

    def run(self, call: Call) -> None:
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                if isinstance(module, _LEAVES) and _is_plain(module):
                    entered = module.register_forward_pre_hook(self._enter)
                    left = module.register_forward_hook(self._leave(name), prepend=True, with_kwargs=True)
                    hooks.callback(entered.remove)
                    hooks.callback(left.remove)
            with self:
                output = call.run(self._model)
        for tensor in tensors_in(output):
            self._freeze(tensor, "it is an output of the model")
        for name, reason in self._touched.items():
            self.units.freeze_tensor(name, reason)
        for tensor_id, uses in self._num_uses.items():
            weight = self._made_by.get(tensor_id)
            if uses > 1 and weight is not None and weight in self.units.consumers:
                # a constant moved into the batch norm would be missing elsewhere
                self.units.consumers[weight] = replace(self.units.consumers[weight], norm=None)
                self.units.norms.pop(weight, None)

    # -- functions ----------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._depth == 0:
            name = getattr(func, "__name__", str(func))
            if name == "__get__":
                name = getattr(getattr(func, "__self__", None), "__name__", name)
            self._follow(func, name, args, kwargs, result)
        return result

    def _follow(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        given = list(tensors_in((args, kwargs)))
        labelled = [t for t in given if id(t) in self._labels]
        results = list(tensors_in(result))
        if not results:
            if name in READS:
                for tensor in labelled:
                    self._freeze(tensor, f"its values are read by {name}")
            return
        for tensor in labelled:
            self._num_uses[id(tensor)] = self._num_uses.get(id(tensor), 0) + 1
        if labelled and name in MOVES:
            self._move(func, name, args, kwargs, labelled, result)
        elif labelled and name in UNARY:
            for tensor in results:
                self._label(tensor, self._labels[id(labelled[0])])
            self.units.happens(kind_of(name, 1), self._labels[id(labelled[0])])
        elif labelled and name in BINARY:
            self._combine(name, given, labelled, results[0])
        elif labelled and name in POOLS:
            self._pool(name, labelled[0], results)
        else:
            self._touch(given, f"it goes through torch's {name}")

    def _touch(self, tensors: Sequence[Tensor], reason: str) -> None:
        for tensor in tensors:
            self._freeze(tensor, reason)
            if id(tensor) in self._names:
                self._touched.setdefault(self._names[id(tensor)], reason)

    def _freeze(self, tensor: Tensor, reason: str) -> None:
        if id(tensor) in self._labels:
            self.units.freeze(self._labels[id(tensor)], reason)

    def _label(self, tensor: Tensor, label: Tensor) -> None:
        self._alive.append(tensor)
        self._labels[id(tensor)] = label
        self._made_by.pop(id(tensor), None)

    def _move(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        labelled: Sequence[Tensor],
        result: Any,
    ) -> None:
        def label_of(tensor: Tensor) -> Tensor:
            if id(tensor) in self._labels:
                return self._labels[id(tensor)]
            indexes = not tensor.is_floating_point() and name == "__getitem__"
            return tensor.cpu() if indexes else torch.zeros(tensor.shape, dtype=torch.long)

        moved_args, moved_kwargs = torch.utils._pytree.tree_map_only(Tensor, label_of, (args, kwargs))
        if name == "view":  # what can be viewed need not be contiguous as a label
            func = Tensor.reshape
        if name in ("contiguous", "clone", "detach", "data"):
            moved: Any = label_of(labelled[0])
        else:
            moved = func(*moved_args, **moved_kwargs)
        had = {int(u) for t in labelled for u in self._labels[id(t)].unique()} - {0}
        for tensor, label in zip(tensors_in(result), tensors_in(moved), strict=True):
            missing = had - {int(u) for u in label.unique()}
            if missing:
                self.units.freeze(torch.tensor(sorted(had)), f"it is cut apart by {name}")
            self._label(tensor, label)

    def _combine(
        self, name: str, given: Sequence[Tensor], labelled: Sequence[Tensor], result: Tensor
    ) -> None:
        reason = f"it meets other data in {name}"
        found = [_along(self._labels[id(t)].broadcast_to(result.shape)) for t in labelled]
        places = [each for each in found if each is not None]
        if len(places) < len(found) or len({dim for dim, _ in places}) > 1:
            self._touch(given, f"neurons in different places meet in {name}")
            return
        dim, ids = places[0]
        for _, others in places[1:]:
            self.units.unite(ids, others)
            alone = (ids == 0) != (others == 0)
            self.units.freeze(torch.where(alone, ids + others, 0), reason)
            ids = torch.where(ids > 0, ids, others)
        kind = kind_of(name, len(labelled))
        for tensor in given:
            own_dim = dim - (result.dim() - tensor.dim())
            if id(tensor) in self._labels or own_dim < 0 or tensor.shape[own_dim] == 1:
                continue
            if id(tensor) in self._names:
                self.units.lie((self._names[id(tensor)], own_dim), ids, "along")
                kind = name
            else:
                self.units.freeze(ids, reason)
        self.units.happens(kind, ids)
        self._label(result, _spread(ids, dim, result.shape))

    def _pool(self, name: str, tensor: Tensor, results: Sequence[Tensor]) -> None:
        along = _along(self._labels[id(tensor)])
        result = results[0]
        if along is None:
            self._freeze(tensor, f"it goes through {name} in an unusual way")
            return
        dim, ids = along
        if result.dim() < tensor.dim() and name in ("mean", "amax"):
            # dimensions that are gone lie before or behind the one of neurons
            fits = [d for d in range(result.dim()) if result.shape[d] == len(ids)]
            dim = fits[0] if len(fits) == 1 else -1
        if dim < 0 or dim >= result.dim() or result.shape[dim] != len(ids):
            self._freeze(tensor, f"{name} goes over it")
            return
        self.units.happens(kind_of(name, 1), ids)
        for each in results:
            self._label(each, _spread(ids, dim, each.shape))

    # -- modules ------------------------------------------------------------------------------------

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            self._depth -= 1
            given = list(tensors_in((args, kwargs)))
            for tensor in given:
                self._num_uses[id(tensor)] = self._num_uses.get(id(tensor), 0) + 1
            known = all(id(p) in self._names for p in module.parameters(recurse=False))
            if not known or not given or not isinstance(given[0], Tensor):
                self._touch(given, f"{name} is not understood")
            elif isinstance(module, nn.Linear):
                self._layer(name, module, given[0], result, -1)
            elif isinstance(module, _CONVOLUTIONS):
                self._convolution(name, module, given[0], result)
            elif isinstance(module, _BATCH_NORMS):
                self._batch_norm(name, module, given[0], result)
            elif isinstance(module, nn.Embedding):
                self._embedding(name, module, result)
            elif isinstance(module, _RECURRENT):
                self._recurrent(name, module, given, result)
            else:
                self._statistics(name, module, given[0], result)

        return leave

    def _name(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self._names[id(tensor)]

    def _entering(self, name: str, tensor: Tensor, dim: int) -> Tensor | None:
        """The units along a dimension of what a layer is given; frozen, and None, if that is not how they
        come."""
        if id(tensor) not in self._labels:
            return None
        along = _along(self._labels[id(tensor)])
        if along is None or along[0] != dim % tensor.dim():
            self._freeze(tensor, f"it enters {name} in an unusual way")
            return None
        return along[1]

    def _layer(
        self, name: str, module: nn.Linear | nn.Module, given: Tensor, result: Tensor, dim: int
    ) -> None:
        """A dense layer or a convolution without groups."""
        weight, bias = module.get_parameter("weight"), getattr(module, "bias", None)
        key, units = self._names[id(weight)], self.units
        padding = getattr(module, "padding", 0)
        zeros = getattr(module, "padding_mode", "zeros") == "zeros"
        pads = zeros and (padding == "same" or (not isinstance(padding, str) and any(_numbers(padding))))
        if (entering := self._entering(name, given, dim)) is not None:
            units.lie((key, 1), entering, "out")
        elif id(given) not in self._labels and (key, 1) in units.places:
            units.freeze_tensor(key, f"{name} also reads other data")
        units.consumers.setdefault(
            key, Consumer(module=name, weight=key, bias=self._name(bias), padded=bool(pads))
        )
        units.layers.setdefault(key, name)
        new = units.fresh(weight.shape[0])
        units.lie((key, 0), new, "in")
        if bias is not None:
            units.lie((self._names[id(bias)], 0), new, "along")
        self._label(result, _spread(units.places[key, 0], dim % result.dim(), result.shape))
        self._made_by[id(result)] = key

    def _convolution(self, name: str, module: nn.Module, given: Tensor, result: Tensor) -> None:
        weight, groups = module.get_parameter("weight"), int(getattr(module, "groups", 1))
        dim = -(weight.dim() - 1)
        if groups == 1:
            self._layer(name, module, given, result, dim)
            return
        entering = self._entering(name, given, dim)
        if groups != weight.shape[0] or weight.shape[1] != 1 or entering is None:
            self._touch([given, weight], f"{name} is a convolution in groups")
            return
        self.units.lie((self._names[id(weight)], 0), entering, "along")
        if (bias := getattr(module, "bias", None)) is not None:
            self.units.lie((self._names[id(bias)], 0), entering, "along")
        self.units.happens("depthwise", entering)
        self._label(result, _spread(entering, dim % result.dim(), result.shape))

    def _batch_norm(self, name: str, module: nn.Module, given: Tensor, result: Tensor) -> None:
        if (entering := self._entering(name, given, 1)) is None:
            return
        for key in ("weight", "bias", "running_mean", "running_var"):
            if (tensor := getattr(module, key)) is not None:
                self.units.lie((self._names[id(tensor)], 0), entering, "along")
        made_by = self._made_by.get(id(given))
        if made_by is not None and module.running_mean is not None:
            self.units.norms[made_by] = name
            self.units.consumers[made_by] = replace(self.units.consumers[made_by], norm=name)
        else:
            self.units.happens("batch_norm", entering)
        self._label(result, _spread(entering, 1, result.shape))

    def _statistics(self, name: str, module: nn.Module, given: Tensor, result: Tensor) -> None:
        """Layer and group norm: what they do to one neuron depends on the others."""
        self._freeze(given, f"{name} ({type(module).__name__}) takes a mean over it and its neighbours")

    def _embedding(self, name: str, module: nn.Embedding, result: Tensor) -> None:
        if module.max_norm is not None:
            return
        key = self._names[id(module.weight)]
        self.units.layers.setdefault(key, name)
        self.units.lie((key, 1), self.units.fresh(module.embedding_dim), "in")
        self._label(result, _spread(self.units.places[key, 1], result.dim() - 1, result.shape))

    def _recurrent(self, name: str, module: nn.RNNBase, given: Sequence[Tensor], result: Any) -> None:
        if module.proj_size or not isinstance(result[0], Tensor):
            self._touch([*given, *module.parameters()], f"{name} has projections or packed sequences")
            return
        gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
        units, own = self.units, self.units.fresh(module.hidden_size)
        entering, sides = self._entering(name, given[0], -1), 1 + module.bidirectional
        for layer in range(module.num_layers):
            for suffix in ("", "_reverse")[:sides]:
                into, over = (getattr(module, f"weight_{kind}_l{layer}{suffix}") for kind in ("ih", "hh"))
                names = {kind: self._names[id(each)] for kind, each in (("ih", into), ("hh", over))}
                for kind, key in names.items():
                    bias = getattr(module, f"bias_{kind}_l{layer}{suffix}", None)
                    units.consumers[key] = Consumer(
                        module=name, weight=key, bias=self._name(bias), padded=kind == "hh" or layer > 0
                    )
                    units.layers.setdefault(key, name)
                    units.lie((key, 0), own.repeat(gates), "in")
                    if bias is not None:
                        units.lie((self._names[id(bias)], 0), own.repeat(gates), "along")
                if entering is not None:
                    units.lie((names["ih"], 1), entering, "out")
                units.lie((names["hh"], 1), own, "out")
            entering = own.repeat(sides)
        if len(given) > 1:
            units.freeze(own, f"the state of {name} is given from outside")
            self._touch(given[1:], f"it is a state of {name}")
        units.happens("recurrent", own)
        self._label(result[0], _spread(own.repeat(sides), result[0].dim() - 1, result[0].shape))
        for state in tensors_in(result[1]):
            self._label(state, _spread(own, state.dim() - 1, state.shape))


def _numbers(value: int | Sequence[int]) -> Sequence[int]:
    return [value] if isinstance(value, int) else value


def _is_plain(module: nn.Module) -> bool:
    """Whether it computes what its class of torch does: no forward of its own, no parametrization."""
    base = next(cls for cls in type(module).__mro__ if cls in _LEAVES)
    return type(module).forward is base.forward and not hasattr(module, "parametrizations")
