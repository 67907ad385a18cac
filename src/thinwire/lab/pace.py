"""How fast this host computes and how far it is: a few bytes shared between the lab and one worker.

The lab writes the speed, the worker writes its step; both are seen at once, without a message or a lock.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

PACE_VARIABLE = "THINWIRE_LAB_PACE"
"""Environment variable naming the file; set by the lab for every worker."""

_SPEED = struct.Struct("=d")
_COUNT = struct.Struct("=q")
_STEPS_AT = _SPEED.size
_RELEASED_AT = _SPEED.size + _COUNT.size
_SIZE = _SPEED.size + 2 * _COUNT.size


class Pace:
    """The speed of a host (1 is full, 0.5 takes twice as long) and the steps its worker has done."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _SIZE)

    @staticmethod
    def create(path: Path, *, speed: float = 1.0) -> Pace:
        """Make the file and open it; one that is there already is made new in place."""
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(_SPEED.pack(speed) + 2 * _COUNT.pack(0))
        return Pace(path)

    @staticmethod
    def of_this_worker() -> Pace | None:
        """The one the lab made for this process; None outside a lab."""
        path = os.environ.get(PACE_VARIABLE, "")
        return Pace(Path(path)) if path and Path(path).exists() else None

    @property
    def speed(self) -> float:
        return float(_SPEED.unpack_from(self._bytes, 0)[0])

    @speed.setter
    def speed(self, value: float) -> None:
        _SPEED.pack_into(self._bytes, 0, value)

    @property
    def steps(self) -> int:
        """Optimizer steps the worker has done."""
        return int(_COUNT.unpack_from(self._bytes, _STEPS_AT)[0])

    @steps.setter
    def steps(self, value: int) -> None:
        _COUNT.pack_into(self._bytes, _STEPS_AT, value)

    @property
    def released(self) -> int:
        """The last step at which a scheduled fault has happened: a worker that waited there goes on."""
        return int(_COUNT.unpack_from(self._bytes, _RELEASED_AT)[0])

    @released.setter
    def released(self, value: int) -> None:
        _COUNT.pack_into(self._bytes, _RELEASED_AT, value)

    def close(self) -> None:
        self._bytes.close()
