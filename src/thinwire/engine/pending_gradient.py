"""A gradient that is still on the wire and looks like any other: whoever reads or changes it waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

_ATTRIBUTES = "shape dtype device layout is_cpu is_cuda is_sparse is_leaf requires_grad grad_fn _version"
_FACTS = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES.split()} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.stride,
    Tensor.is_floating_point,
}
"""What is known of it before its numbers are."""


class PendingGradient(Tensor):
    """Shares the memory of a bucket. torch's functions see the numbers after `wait`; what autograd does by
    itself is not seen, but is noticed: it changes the version."""

    _wait: Callable[[], None]
    _seen: int

    @classmethod
    def of(cls, view: Tensor, wait: Callable[[], None]) -> PendingGradient:
        # not a view for torch: a version of its own tells who has written to it
        memory = torch.empty(0, dtype=view.dtype, device=view.device)
        memory.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        pending: PendingGradient = Tensor._make_subclass(cls, memory)
        pending._wait, pending._seen = wait, pending._version
        return pending

    @property
    def was_accumulated_into(self) -> bool:
        """Whether a backward pass has added to it behind our back."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._version != self._seen

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **kwargs)
            pending = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PendingGradient)]
            for each in pending:
                each._wait()
            try:
                return tree_map_only(PendingGradient, _plain, func(*args, **kwargs))
            finally:
                for each in pending:
                    each._seen = each._version


def _plain(result: PendingGradient) -> Tensor:
    """What comes of it is a tensor like any other; itself, from an operation in place, stays what it is."""
    return result if hasattr(result, "_wait") else result.as_subclass(Tensor)
