"""What is still to be done when the script ends, such as detaching a link; the last one first."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import cache
from types import MethodType

_methods: list[weakref.WeakMethod[MethodType]] = []


def remember(method: Callable[[], None]) -> None:
    """Call this method when the script ends, if its object is still there."""
    assert isinstance(method, MethodType)
    _register()
    _methods.append(weakref.WeakMethod(method, _methods.remove))


@cache
def _register() -> None:
    """Once, since nothing that is registered is ever forgotten."""
    # before threads are ended; atexit would be too late to wait for others
    threading._register_atexit(_call_all)  # type: ignore[attr-defined]


def _call_all() -> None:
    while _methods:
        if (method := _methods.pop()()) is not None:
            method()
