"""What the members of a generation publish for all others, such as where they listen."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.elastic.membership import Membership
from thinwire.wire.control import Message

_LONGEST_KEY = 256
_MOST_VALUES = 1 << 16
_MOST_AHEAD = 64
"""Generations that another worker may be ahead of this one."""


class Board:
    """Values by generation and key, this worker's own and those of others. A value never changes."""

    def __init__(self) -> None:
        self.own: list[Message] = []
        """Messages with what this worker has published, for whoever connects later."""
        self._values: dict[tuple[int, str], str] = {}

    def publish(self, generation: int, key: str, value: bytes) -> Message:
        """Put up a value of this worker; returns the message that tells the others."""
        message: Message = ["set", generation, key, value.hex()]
        self.own.append(message)
        self._values[generation, key] = message[3]
        return message

    def receive(self, generation: int, key: str, value: str, current: Membership | None) -> bool:
        """Put up a value of another worker, if it makes sense."""
        sane = len(key) <= _LONGEST_KEY and len(self._values) < _MOST_VALUES and _is_hex(value)
        now = generation if current is None else current.generation
        if not (sane and now <= generation <= now + _MOST_AHEAD):
            return False
        self._values[generation, key] = value
        return True

    def read(self, generation: int, keys: Sequence[str]) -> list[bytes] | None:
        """The values of these keys; None unless all are there."""
        found = [self._values.get((generation, key)) for key in keys]
        present = [bytes.fromhex(value) for value in found if value is not None]
        return present if len(present) == len(keys) else None

    def forget_before(self, generation: int) -> None:
        self.own = [each for each in self.own if each[1] >= generation]
        self._values = {key: value for key, value in self._values.items() if key[0] >= generation}

    def clear(self) -> None:
        self.own, self._values = [], {}


def _is_hex(value: str) -> bool:
    try:
        bytes.fromhex(value)
    except ValueError:
        return False
    return True
