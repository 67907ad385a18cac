"""The idx format of MNIST and its relatives: a magic number, the sizes, then unsigned bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import DataError

_UNSIGNED_BYTES = 0x08


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes, plain or packed with gzip."""
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataError(f"{path} is not an idx file: it does not start with two zero bytes", hint=_HINT)
    kind, num_dims = content[2], content[3]
    if kind != _UNSIGNED_BYTES:
        raise DataError(f"{path} holds type 0x{kind:02x}, only unsigned bytes (0x08) can be read", hint=_HINT)
    start = 4 + 4 * num_dims
    if len(content) < start:
        raise DataError(f"{path} is cut off inside its header ({len(content)} bytes)", hint=_HINT)
    shape = struct.unpack_from(f">{num_dims}I", content, 4)
    expected = start + math.prod(shape)
    if len(content) != expected:
        sizes = " x ".join(str(size) for size in shape)
        raise DataError(
            f"{path} is damaged: {sizes} need {expected:,} bytes, it has {len(content):,}", hint=_HINT
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


_HINT = "fetch the file again and compare its size or checksum with the source's"


def _content(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        # told by content: browsers and download tools like to unpack a .gz and keep its name
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}", hint=_HINT) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
