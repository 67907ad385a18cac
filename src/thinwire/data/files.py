"""Data sets of plain arrays, digits and HIGGS; and for all loaders: --data, packed and damaged files."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import DataError

FETCH_AGAIN = "fetch the file again and compare its size or checksum with the source's"
_HIGGS_FEATURES = 28
_HIGGS_HINT = (
    "put higgs.npz with the arrays x_train, x_test (n x 28 numbers) and y_train, y_test (0 or 1), cut from "
    "HIGGS.csv of the UCI repository, into a folder and name it with --data DIR"
)


@dataclass(frozen=True, slots=True)
class Arrays:
    """Samples in memory: `inputs[i]` belongs to `targets[i]`."""

    inputs: NDArray[np.uint8] | NDArray[np.float32]
    targets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class TrainTest:
    """A data set with its fixed split."""

    train: Arrays
    test: Arrays


def named_folder(folder: Path | None, what: str, hint: str) -> Path:
    """Return the folder the user named for `what`; DataError if there is none."""
    if folder is None:
        raise DataError(f"{what} is not part of the package, and no folder was named", hint=hint)
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"the data folder {folder} {reason}", hint=hint)
    return folder


def first_file(folder: Path, subfolders: Sequence[str], names: Sequence[str]) -> Path | None:
    """Return the first of `names` that is a file in `folder` or one of its `subfolders`."""
    candidates = (folder / subfolder / name for subfolder in subfolders for name in names)
    return next((path for path in candidates if path.is_file()), None)


def content(path: Path) -> bytes:
    """Read a file, plain or packed with gzip."""
    try:
        raw = path.read_bytes()
        # detected by content: browsers and download tools often unpack a .gz and keep its name
        return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: {error}", hint=FETCH_AGAIN) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def labelled(path: Path, inputs: NDArray[Any], labels: NDArray[Any], num_classes: int, hint: str) -> Arrays:
    """Put inputs and their labels together; DataError unless each has one, from 0 to `num_classes` - 1."""
    labels = labels.reshape(-1)  # some have them as a column
    if len(labels) != len(inputs):
        raise DataError(f"{path} holds {len(labels):,} labels, not {len(inputs):,} labels", hint=hint)
    if len(labels) == 0 or not np.isin(labels, range(num_classes)).all():
        raise DataError(f"{path} must hold labels from 0 to {num_classes - 1}", hint=hint)
    return Arrays(inputs, labels.astype(np.int64))


def read_npz(
    path: Path, checked: Callable[[Path, NDArray[Any], NDArray[Any]], Arrays], hint: str
) -> TrainTest:
    """Read x_train, y_train, x_test and y_test from an .npz file, each pair through `checked`.

    Nothing pickled is ever loaded.
    """
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        # opened here: numpy leaves a file open that turns out to be damaged
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            if missing:
                held = ", ".join(file.files) or "nothing"
                raise DataError(f"{path} lacks {', '.join(missing)}; it holds {held}", hint=hint)
            x_train, y_train, x_test, y_test = (file[name] for name in names)
    except (ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        # numpy answers a file that is no archive, and one with pickled arrays, in all of these ways
        raise DataError(f"{path} is damaged or no .npz file of plain arrays: {error}", hint=hint) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
    return TrainTest(checked(path, x_train, y_train), checked(path, x_test, y_test))


def load_digits() -> TrainTest:
    """Load 1,797 real handwritten digits inside the package, with their fixed split; pixels are 0 to 16.

    >>> data = load_digits()
    >>> len(data.train), len(data.test), data.train.inputs.shape[1:]
    (1437, 360, (8, 8))
    """
    with (resources.files("thinwire.data") / "digits.npz").open("rb") as file, np.load(file) as stored:
        images, labels, is_test = stored["images"], stored["labels"].astype(np.int64), stored["is_test"]
    return TrainTest(Arrays(images[~is_test], labels[~is_test]), Arrays(images[is_test], labels[is_test]))


def find_higgs(folder: Path | None) -> Path:
    """Return the file in `folder`; DataError if it is missing."""
    folder = named_folder(folder, "HIGGS", _HIGGS_HINT)
    path = first_file(folder, ("", "higgs"), ("higgs.npz", "HIGGS.npz"))
    if path is None:
        raise DataError(f"no higgs.npz in {folder}", hint=_HIGGS_HINT)
    return path


def load_higgs(folder: Path | None) -> TrainTest:
    """Load HIGGS from `folder`: collisions described by 28 numbers, signal or background.

    Each feature is scaled to mean 0 and deviation 1 over the training part.
    """
    data = read_npz(find_higgs(folder), _checked_higgs, _HIGGS_HINT)
    mean, deviation = data.train.inputs.mean(axis=0), data.train.inputs.std(axis=0)
    deviation[deviation == 0] = 1  # a constant feature
    parts = (data.train, data.test)
    return TrainTest(
        *(Arrays(((part.inputs - mean) / deviation).astype(np.float32), part.targets) for part in parts)
    )


def _checked_higgs(path: Path, features: NDArray[Any], labels: NDArray[Any]) -> Arrays:
    if features.shape[1:] != (_HIGGS_FEATURES,) or features.dtype.kind not in "fiu":
        found = f"{features.dtype} {features.shape}, not as n x {_HIGGS_FEATURES} numbers"
        raise DataError(f"{path} holds features as {found}", hint=_HIGGS_HINT)
    if not np.isfinite(features).all():
        raise DataError(f"{path} holds NaN or infinity", hint=_HIGGS_HINT)
    return labelled(path, features.astype(np.float32), labels, 2, _HIGGS_HINT)
