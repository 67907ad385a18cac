"""CIFAR-10 from plain arrays in an .npz file, or from the binary batches its authors publish."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.arrays import Arrays, TrainTest
from thinwire.data.files import AGAIN, content, first_file, named_folder, read_npz
from thinwire.errors import DataError

_NPZ = ("cifar10.npz", "cifar-10.npz")
_SUBFOLDERS = ("", "cifar-10-batches-bin", "cifar10")
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = "test_batch.bin"
_RECORD_BYTES = 1 + 3 * 32 * 32
_HINT = (
    "put cifar10.npz with the arrays x_train, y_train, x_test, y_test (images as bytes, n x 32 x 32 x 3), or "
    "data_batch_1.bin to data_batch_5.bin and test_batch.bin of cifar-10-binary.tar.gz, into one folder and "
    "name it with --data DIR"
)


@dataclass(frozen=True, slots=True)
class CifarFiles:
    """Where the files are: one .npz, or the binary batches."""

    npz: Path | None
    train: tuple[Path, ...] = ()
    test: Path | None = None


def find_cifar(folder: Path | None) -> CifarFiles:
    """The files in `folder` or where the authors' archive puts them below it; DataError if one is missing."""
    folder = named_folder(folder, "CIFAR-10", _HINT)
    npz = first_file(folder, _SUBFOLDERS, _NPZ)
    if npz is not None:
        return CifarFiles(npz)
    any_batch = first_file(folder, _SUBFOLDERS, (*_TRAIN, _TEST))
    if any_batch is None:
        raise DataError(f"no CIFAR-10 files in {folder}", hint=_HINT)
    place = any_batch.parent
    missing = [name for name in (*_TRAIN, _TEST) if not (place / name).is_file()]
    if missing:
        raise DataError(f"{place} lacks {', '.join(missing)}", hint=_HINT)
    return CifarFiles(None, tuple(place / name for name in _TRAIN), place / _TEST)


def load_cifar(folder: Path | None) -> TrainTest:
    """CIFAR-10 from `folder`, with its own split; images are n x 32 x 32 x 3 bytes."""
    files = find_cifar(folder)
    if files.npz is not None:
        arrays = read_npz(files.npz, ("x_train", "y_train", "x_test", "y_test"), _HINT)
        return TrainTest(
            _checked(files.npz, arrays["x_train"], arrays["y_train"]),
            _checked(files.npz, arrays["x_test"], arrays["y_test"]),
        )
    assert files.test is not None, "found together with the training batches"
    parts = [_read_batch(path) for path in files.train]
    train = Arrays(
        np.concatenate([part.inputs for part in parts]), np.concatenate([part.targets for part in parts])
    )
    return TrainTest(train, _read_batch(files.test))


def _read_batch(path: Path) -> Arrays:
    """One binary batch: records of a label and the red, green and blue planes."""
    raw = np.frombuffer(content(path), np.uint8)
    if len(raw) == 0 or len(raw) % _RECORD_BYTES:
        raise DataError(
            f"{path} is damaged: {len(raw):,} bytes are no whole number of records of {_RECORD_BYTES:,}",
            hint=AGAIN,
        )
    records = raw.reshape(-1, _RECORD_BYTES)
    return _checked(path, records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0])


def _checked(path: Path, images: NDArray[Any], labels: NDArray[Any]) -> Arrays:
    if images.dtype != np.uint8 or images.shape[1:] not in ((32, 32, 3), (3, 32, 32)):
        raise DataError(
            f"{path} holds images as {images.dtype} {images.shape}, not as bytes n x 32 x 32 x 3", hint=_HINT
        )
    if images.shape[1] == 3:
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    labels = labels.reshape(-1).astype(np.int64)  # some have them as a column
    if len(labels) != len(images):
        raise DataError(f"{path} holds {len(images):,} images but {len(labels):,} labels", hint=_HINT)
    if len(labels) == 0 or labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{path} must hold labels from 0 to 9", hint=_HINT)
    return Arrays(images, labels)
