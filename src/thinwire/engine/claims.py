"""Which parameters have a link. One at a time: two would both send, and step, the same gradients."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from thinwire.errors import UsageError

_claimed = WeakTensorKeyDictionary()  # weak: a model that is gone needs no detach


def check_free(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UsageError if one of the parameters already has a link."""
    for name, parameter in named:
        if parameter in _claimed:
            raise UsageError(
                f"parameter {name} is already attached",
                hint="detach that link first, by link.detach() or by leaving its `with` block",
            )


def claim(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _claimed[parameter] = True


def release(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        _claimed.pop(parameter, None)
