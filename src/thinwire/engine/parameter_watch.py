"""Notices parameters that are not what they were at attach: converted, moved, reshaped or replaced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine.buckets import ParameterBucket, local
from thinwire.errors import UsageError


class ParameterWatch:
    """What a link may take for granted of the parameters it was given.

    Asked in every step, so it only looks where the numbers of each parameter are, and how many:
    `model.to(...)` makes new ones. New ones of the same kind are fine: some optimizers do `p.data = ...`.
    """

    def __init__(
        self, model: nn.Module, buckets: Sequence[ParameterBucket], attached: Collection[int]
    ) -> None:
        """`attached`: the ids of all attached parameters, of which some may be in no bucket."""
        self._buckets = buckets
        self._attached = attached
        self._held: list[Tensor] = []
        """What optimizers held when last looked at, and which of it is not attached."""
        self._not_attached: list[Tensor] = []
        self._parameters = [p for bucket in buckets for p in bucket.parameters]
        self._plain = all(local(p) is p for p in self._parameters)
        places = list(_places(model, attached))
        self._names = [name for name, _, _, _ in places]
        self._holders = [holder for _, holder, _, _ in places]
        self._keys = [key for _, _, key, _ in places]
        self._found = [found for _, _, _, found in places]
        self._remember()

    def _remember(self) -> None:
        locals_ = self._parameters if self._plain else [local(p) for p in self._parameters]
        self._pointers = list(map(Tensor.data_ptr, locals_))
        self._numels = list(map(Tensor.numel, locals_))

    def check_kind(self) -> None:
        """Raise UsageError if a parameter has another dtype, device or shape than at attach."""
        locals_ = self._parameters if self._plain else [local(p) for p in self._parameters]
        if (
            list(map(Tensor.data_ptr, locals_)) == self._pointers
            and list(map(Tensor.numel, locals_)) == self._numels
        ):
            return
        for bucket in self._buckets:
            bucket.check_kind()
        self._remember()

    def check_place(self) -> None:
        """Raise UsageError if the model holds another parameter in the place of one that is attached."""
        if all(map(is_, self._found, map(_get, self._holders, self._keys))):
            return
        now = map(_get, self._holders, self._keys)
        rows = zip(self._names, self._found, now, strict=True)
        name = next(name for name, before, after in rows if before is not after)
        raise UsageError(
            f"{name} of the model was replaced after attach: nobody would send the new one",
            hint="replace it before attach; or link.detach(), then attach again",
        )

    def check_held(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise UsageError if an optimizer holds a parameter to train that is not attached."""
        groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
        held = list(chain.from_iterable(group["params"] for group in groups))
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            self._held = held
            self._not_attached = [p for p in held if id(p) not in self._attached]
        if any(p.requires_grad for p in self._not_attached):
            raise UsageError(
                "optimizer holds a parameter that requires a gradient and did not, or was not in the "
                "model, at attach: nobody would send it",
                hint="after unfreezing or adding parameters, detach and attach again",
            )


_get: Callable[[dict[str, Any], str], object] = dict.get


def _places(
    model: nn.Module, parameters: Collection[int]
) -> Iterator[tuple[str, dict[str, Any], str, object]]:
    """Where the model keeps these parameters, and the modules on the way to them: name, dict, key, object."""
    on_the_way: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if id(parameter) in parameters:
                yield f"{name}.{key}".lstrip("."), module._parameters, key, parameter
                parts = name.split(".")
                on_the_way.update(".".join(parts[: n + 1]) for n in range(len(parts)) if name)
    for name, module in model.named_modules(remove_duplicate=False):
        for key, child in module._modules.items():
            path = f"{name}.{key}".lstrip(".")
            if path in on_the_way:
                yield path, module._modules, key, child
