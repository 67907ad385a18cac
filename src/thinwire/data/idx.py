"""The idx format of MNIST and its relatives: a magic number, the sizes, then unsigned bytes."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.data.files import AGAIN, content
from thinwire.errors import DataError

_UNSIGNED_BYTES = 0x08


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes, plain or packed with gzip."""
    raw = content(path)
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise DataError(f"{path} is not an idx file: it does not start with two zero bytes", hint=AGAIN)
    kind, num_dims = raw[2], raw[3]
    if kind != _UNSIGNED_BYTES:
        raise DataError(f"{path} holds type 0x{kind:02x}, only unsigned bytes (0x08) can be read", hint=AGAIN)
    start = 4 + 4 * num_dims
    if len(raw) < start:
        raise DataError(f"{path} is cut off inside its header ({len(raw)} bytes)", hint=AGAIN)
    shape = struct.unpack_from(f">{num_dims}I", raw, 4)
    expected = start + math.prod(shape)
    if len(raw) != expected:
        sizes = " x ".join(str(size) for size in shape)
        raise DataError(
            f"{path} is damaged: {sizes} need {expected:,} bytes, it has {len(raw):,}", hint=AGAIN
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
