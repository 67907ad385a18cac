"""What all loaders share: the folder named with --data, and files that may be packed, damaged or missing."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import DataError

AGAIN = "fetch the file again and compare its size or checksum with the source's"


def named_folder(folder: Path | None, what: str, hint: str) -> Path:
    """The folder the user named for `what`; DataError if there is none."""
    if folder is None:
        raise DataError(f"{what} is not part of the package, and no folder was named", hint=hint)
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"the data folder {folder} {reason}", hint=hint)
    return folder


def first_file(folder: Path, subfolders: Sequence[str], names: Sequence[str]) -> Path | None:
    """The first of `names` that is a file in `folder` or one of its `subfolders`."""
    candidates = (folder / subfolder / name for subfolder in subfolders for name in names)
    return next((path for path in candidates if path.is_file()), None)


def content(path: Path) -> bytes:
    """The bytes of a file, plain or packed with gzip."""
    try:
        raw = path.read_bytes()
        # told by content: browsers and download tools like to unpack a .gz and keep its name
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}", hint=AGAIN) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def read_npz(path: Path, names: Sequence[str], hint: str) -> Mapping[str, NDArray[Any]]:
    """The arrays called `names` in an .npz file; nothing pickled is ever loaded."""
    try:
        # opened here: numpy leaves a file open that turns out to be damaged
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            if missing:
                held = ", ".join(file.files) or "nothing"
                raise DataError(f"{path} lacks {', '.join(missing)}; it holds {held}", hint=hint)
            return {name: file[name] for name in names}
    except (ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        # numpy answers a file that is no archive, and one with pickled arrays, in all of these ways
        raise DataError(f"{path} is damaged or no .npz file of plain arrays: {error}", hint=hint) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
