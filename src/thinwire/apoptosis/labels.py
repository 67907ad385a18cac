"""Labels of tensors: which unit each of their numbers belongs to, while a model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from thinwire.apoptosis.units import Units


class Labels:
    """A label is a tensor of the same shape with the unit of every number; 0: none."""

    def __init__(self, model: nn.Module) -> None:
        self.units = Units()
        self.names = {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}
        self._labels: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []
        """Tensors with a label: their ids must not be used again."""
        self._made_by: dict[int, str] = {}
        """The weight of the layer that a tensor comes from, without anything in between."""
        self._num_uses: dict[int, int] = {}
        self._touched: dict[str, str] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._labels

    def __getitem__(self, tensor: Tensor) -> Tensor:
        return self._labels[id(tensor)]

    def name(self, tensor: Tensor | None) -> str | None:
        return None if tensor is None else self.names[id(tensor)]

    def made_by(self, tensor: Tensor) -> str | None:
        return self._made_by.get(id(tensor))

    def set(self, tensor: Tensor, label: Tensor, *, made_by: str | None = None) -> None:
        """Label a tensor; `made_by`: the weight of the layer that it comes from."""
        self._alive.append(tensor)
        self._labels[id(tensor)] = label
        self._made_by.pop(id(tensor), None)
        if made_by is not None:
            self._made_by[id(tensor)] = made_by

    def use(self, tensor: Tensor) -> None:
        """Count an operation that reads it."""
        self._num_uses[id(tensor)] = self._num_uses.get(id(tensor), 0) + 1

    def freeze(self, tensor: Tensor, reason: str) -> None:
        """Leave all units of a tensor alone."""
        if tensor in self:
            self.units.freeze(self[tensor], reason)

    def touch(self, tensors: Sequence[Tensor], reason: str) -> None:
        """Leave alone what such tensors carry, and those of the model that are among them."""
        for tensor in tensors:
            self.freeze(tensor, reason)
            if id(tensor) in self.names:
                self._touched.setdefault(self.names[id(tensor)], reason)

    def entering(self, name: str, tensor: Tensor, dim: int) -> Tensor | None:
        """The units along a dimension of what a layer is given; frozen, and None, if that is not how they
        come."""
        if tensor not in self:
            return None
        along = along_one_dimension(self[tensor])
        if along is None or along[0] != dim % tensor.dim():
            self.freeze(tensor, f"it enters {name} in an unusual way")
            return None
        return along[1]

    def finish(self) -> None:
        """What is known only when the model has computed everything."""
        for name, reason in self._touched.items():
            self.units.freeze_tensor(name, reason)
        for tensor_id, uses in self._num_uses.items():
            weight = self._made_by.get(tensor_id)
            if uses > 1 and weight is not None and weight in self.units.consumers:
                # a constant moved into the batch norm would be missing elsewhere
                self.units.consumers[weight] = replace(self.units.consumers[weight], norm=None)
                self.units.norms.pop(weight, None)


def along_one_dimension(label: Tensor) -> tuple[int, Tensor] | None:
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


def spread(ids: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    view = [1] * len(shape)
    view[dim] = -1
    return ids.view(view).expand(list(shape))
