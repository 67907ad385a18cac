"""Files that hold the key of a run."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from thinwire.errors import DataError

KEY_BYTES = 32
_HINT = "make one with `thinwire keys new FILE`"


def write_key(path: Path) -> None:
    """Make a new key, in a file that only its owner can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise DataError(f"{path} exists", hint="name another file, or remove it first") from error
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(KEY_BYTES) + "\n")


def read_key(path: Path) -> bytes:
    """The key in a file; DataError if there is none."""
    try:
        text = path.read_text().strip()
        key = bytes.fromhex(text)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} holds no key: {error}", hint=_HINT) from error
    if len(key) != KEY_BYTES:
        raise DataError(f"{path} holds no key: {KEY_BYTES} bytes as hexadecimal digits", hint=_HINT)
    return key
