"""Follows neurons through one forward pass of a model, and finds the groups that can be cut.

Every output of a layer gets a number, its label, kept in a tensor of the same shape beside it. Operations
that only move numbers are applied to labels too; those that combine numbers make their labels one; whatever
else is met freezes its inputs, by name. So what is not understood is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from thinwire.apoptosis.calls import Call, tensors_in, undisturbed
from thinwire.apoptosis.labels import Labels, along_one_dimension, spread
from thinwire.apoptosis.layers import LEAVES, follow, is_plain
from thinwire.apoptosis.operations import BINARY, MOVES, POOLS, READS, UNARY, kind_of
from thinwire.apoptosis.units import Group

OUTPUT = "it is an output of the model"
SOFTMAXES = ("softmax", "log_softmax")
ENDS = (OUTPUT, *(f"it goes through torch's {name}" for name in SOFTMAXES))
"""Why the outputs of a model are left alone."""
NEURONS_PER_OUTPUT = 2
"""Neurons kept for each output that they feed, but at most half of the layer."""


def trace(model: nn.Module, call: Call) -> list[Group]:
    """The groups of a model's neurons, found with the first samples of a call; some of them frozen."""
    with undisturbed(model):
        tracer = _Tracer(model)
        try:
            tracer.run(call.first(2))
        except Exception:  # noqa: BLE001 (it may need its whole batch; then an error is the model's own)
            tracer = _Tracer(model)
            tracer.run(call)
    groups = tracer.labels.units.groups()
    _keep_for_outputs(groups)
    return groups


def _keep_for_outputs(groups: Sequence[Group]) -> None:
    """A layer in front of a wide classifier keeps more: few neurons tell few classes apart, and a young
    network does not show it yet."""
    ends = [group for group in groups if group.frozen in ENDS]
    outputs = {place: group.size for group in ends for place in group.places}
    for group in groups:
        fed = max((outputs.get((each.weight, 0), 0) for each in group.consumers), default=0)
        group.least = max(1, min(NEURONS_PER_OUTPUT * fed, group.size // 2))


class _Tracer(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.labels = Labels(model)
        self._model = model
        self._depth = 0

    def run(self, call: Call) -> None:
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if isinstance(module, LEAVES) and is_plain(module):
                    entered = module.register_forward_pre_hook(self._enter)
                    left = module.register_forward_hook(self._leave(name), prepend=True, with_kwargs=True)
                    hooks.callback(entered.remove)
                    hooks.callback(left.remove)
            with self:
                output = call.run(self._model)
        for tensor in tensors_in(output):
            self.labels.freeze(tensor, OUTPUT)
        self.labels.finish()

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
            self._follow_function(func, name, args, kwargs, result)
        return result

    def _follow_function(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        given = list(tensors_in((args, kwargs)))
        labelled = [t for t in given if t in self.labels]
        results = list(tensors_in(result))
        if not results:
            if name in READS:
                for tensor in labelled:
                    self.labels.freeze(tensor, f"its values are read by {name}")
            return
        for tensor in labelled:
            self.labels.use(tensor)
        if labelled and name in MOVES:
            self._move(func, name, args, kwargs, labelled, result)
        elif labelled and name in UNARY:
            for tensor in results:
                self.labels.set(tensor, self.labels[labelled[0]])
            self.labels.units.happens(kind_of(name, 1), self.labels[labelled[0]])
        elif labelled and name in BINARY:
            self._combine(name, given, labelled, results[0])
        elif labelled and name in POOLS:
            self._pool(name, labelled[0], results)
        else:
            self.labels.touch(given, f"it goes through torch's {name}")

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
            if tensor in self.labels:
                return self.labels[tensor]
            indexes = not tensor.is_floating_point() and name == "__getitem__"
            return tensor.cpu() if indexes else torch.zeros(tensor.shape, dtype=torch.long)

        moved_args, moved_kwargs = torch.utils._pytree.tree_map_only(Tensor, label_of, (args, kwargs))
        if name == "view":  # what can be viewed need not be contiguous as a label
            func = Tensor.reshape
        if name in ("contiguous", "clone", "detach", "data"):
            moved: Any = label_of(labelled[0])
        else:
            moved = func(*moved_args, **moved_kwargs)
        had = {int(u) for t in labelled for u in self.labels[t].unique()} - {0}
        for tensor, label in zip(tensors_in(result), tensors_in(moved), strict=True):
            missing = had - {int(u) for u in label.unique()}
            if missing:
                self.labels.units.freeze(torch.tensor(sorted(had)), f"it is cut apart by {name}")
            self.labels.set(tensor, label)

    def _combine(
        self, name: str, given: Sequence[Tensor], labelled: Sequence[Tensor], result: Tensor
    ) -> None:
        reason = f"it meets other data in {name}"
        found = [along_one_dimension(self.labels[t].broadcast_to(result.shape)) for t in labelled]
        places = [each for each in found if each is not None]
        if len(places) < len(found) or len({dim for dim, _ in places}) > 1:
            self.labels.touch(given, f"neurons in different places meet in {name}")
            return
        dim, ids = places[0]
        for _, others in places[1:]:
            self.labels.units.unite(ids, others)
            alone = (ids == 0) != (others == 0)
            self.labels.units.freeze(torch.where(alone, ids + others, 0), reason)
            ids = torch.where(ids > 0, ids, others)
        kind = kind_of(name, len(labelled))
        for tensor in given:
            own_dim = dim - (result.dim() - tensor.dim())
            if tensor in self.labels or own_dim < 0 or tensor.shape[own_dim] == 1:
                continue
            if id(tensor) in self.labels.names:
                self.labels.units.lie((self.labels.names[id(tensor)], own_dim), ids, "along")
                kind = name
            else:
                self.labels.units.freeze(ids, reason)
        self.labels.units.happens(kind, ids)
        self.labels.set(result, spread(ids, dim, result.shape))

    def _pool(self, name: str, tensor: Tensor, results: Sequence[Tensor]) -> None:
        along = along_one_dimension(self.labels[tensor])
        result = results[0]
        if along is None:
            self.labels.freeze(tensor, f"it goes through {name} in an unusual way")
            return
        dim, ids = along
        if result.dim() < tensor.dim() and name in ("mean", "amax"):
            # dimensions that are gone lie before or behind the one of neurons
            fits = [d for d in range(result.dim()) if result.shape[d] == len(ids)]
            dim = fits[0] if len(fits) == 1 else -1
        if dim < 0 or dim >= result.dim() or result.shape[dim] != len(ids):
            self.labels.freeze(tensor, f"{name} goes over it")
            return
        self.labels.units.happens(kind_of(name, 1), ids)
        for each in results:
            self.labels.set(each, spread(ids, dim, each.shape))

    # -- modules ------------------------------------------------------------------------------------

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            given = list(tensors_in((args, kwargs)))
            for tensor in given:
                self.labels.use(tensor)
            follow(self.labels, name, module, given, result)
            self._depth -= 1  # what labels go through is not followed

        return leave
