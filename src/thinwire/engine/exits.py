"""Links that are still attached when the script ends, which are detached then, the last one first."""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Protocol


class Attached(Protocol):
    """What wants to know that the script ends."""

    def at_exit(self) -> None: ...


_attached: list[weakref.ref[Attached]] = []


def remember(link: Attached) -> None:
    """Tell this one when the script ends, if it is still there."""
    _register()
    _attached.append(weakref.ref(link, _attached.remove))


@cache
def _register() -> None:
    """Once, since nothing that is registered is ever forgotten."""
    # before threads are ended; atexit would be too late to wait for others
    threading._register_atexit(_tell_all)  # type: ignore[attr-defined]


def _tell_all() -> None:
    while _attached:
        if (link := _attached.pop()()) is not None:
            link.at_exit()
