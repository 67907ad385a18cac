"""Images: MNIST (or Fashion-MNIST, same format) and CIFAR-10, from files in a folder."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.files import (
    FETCH_AGAIN,
    Arrays,
    TrainTest,
    content,
    first_file,
    labelled,
    named_folder,
    read_npz,
)
from thinwire.errors import DataError

_MNIST_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_MNIST_SUBFOLDERS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")  # the latter as torchvision lays them out
_MNIST_HINT = (
    f"put {', '.join(_MNIST_NAMES[:3])} and {_MNIST_NAMES[3]} (each plain or as .gz) into one folder and "
    "name it with --data DIR"
)
_CIFAR_SUBFOLDERS = ("", "cifar-10-batches-bin", "cifar10")
_CIFAR_BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_RECORD_BYTES = 1 + 3 * 32 * 32
_CIFAR_HINT = (
    "put cifar10.npz with the arrays x_train, y_train, x_test, y_test (images as bytes, n x 32 x 32 x 3), or "
    "data_batch_1.bin to data_batch_5.bin and test_batch.bin of cifar-10-binary.tar.gz, into one folder and "
    "name it with --data DIR"
)


def find_mnist(folder: Path | None) -> list[Path]:
    """Return the four files, in the order train images and labels, test images and labels.

    They are looked for in `folder` and where torchvision puts them below it; DataError if one is missing.
    """
    folder = named_folder(folder, "MNIST", _MNIST_HINT)
    # all four from one folder, the fullest: next to MNIST there may be Fashion-MNIST
    found = max((_mnist_files(folder / subfolder) for subfolder in _MNIST_SUBFOLDERS), key=len)
    if not found:
        raise DataError(f"no MNIST files in {folder}", hint=_MNIST_HINT)
    missing = [name for name in _MNIST_NAMES if name not in found]
    if missing:
        raise DataError(f"{next(iter(found.values())).parent} lacks {', '.join(missing)}", hint=_MNIST_HINT)
    return list(found.values())


def _mnist_files(folder: Path) -> dict[str, Path]:
    found = {}
    for name in _MNIST_NAMES:
        spellings = (name, name.replace("-idx", ".idx"))  # both are in circulation
        names = [each + suffix for each in spellings for suffix in ("", ".gz")]
        if path := first_file(folder, ("",), names):
            found[name] = path
    return found


def load_mnist(folder: Path | None) -> TrainTest:
    """Load MNIST from `folder`, with its own split; pixels are 0 to 255."""
    train_images, train_labels, test_images, test_labels = find_mnist(folder)
    return TrainTest(_load_mnist(train_images, train_labels), _load_mnist(test_images, test_labels))


def _load_mnist(images_path: Path, labels_path: Path) -> Arrays:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise DataError(
            f"{images_path} holds an array of {images.shape}, not images of 28 x 28", hint=_MNIST_HINT
        )
    return labelled(labels_path, images, labels, 10, _MNIST_HINT)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, plain or as .gz: a magic number, the sizes, then the bytes."""
    raw = content(path)
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise DataError(f"{path} is not an idx file: it does not start with two zero bytes", hint=FETCH_AGAIN)
    kind, num_dims = raw[2], raw[3]
    if kind != 0x08:
        message = f"{path} holds type 0x{kind:02x}, only unsigned bytes (0x08) can be read"
        raise DataError(message, hint=FETCH_AGAIN)
    start = 4 + 4 * num_dims
    if len(raw) < start:
        raise DataError(f"{path} is cut off inside its header ({len(raw)} bytes)", hint=FETCH_AGAIN)
    shape = struct.unpack_from(f">{num_dims}I", raw, 4)
    expected = start + math.prod(shape)
    if len(raw) != expected:
        sizes = " x ".join(str(size) for size in shape)
        message = f"{path} is damaged: {sizes} need {expected:,} bytes, it has {len(raw):,}"
        raise DataError(message, hint=FETCH_AGAIN)
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def find_cifar(folder: Path | None) -> list[Path]:
    """Return one .npz file, or the binary batches with the test batch last; DataError if one is missing.

    They are looked for in `folder` and where the authors' archive puts them below it.
    """
    folder = named_folder(folder, "CIFAR-10", _CIFAR_HINT)
    if npz := first_file(folder, _CIFAR_SUBFOLDERS, ("cifar10.npz", "cifar-10.npz")):
        return [npz]
    any_batch = first_file(folder, _CIFAR_SUBFOLDERS, _CIFAR_BATCHES)
    if any_batch is None:
        raise DataError(f"no CIFAR-10 files in {folder}", hint=_CIFAR_HINT)
    paths = [any_batch.with_name(name) for name in _CIFAR_BATCHES]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"{any_batch.parent} lacks {', '.join(missing)}", hint=_CIFAR_HINT)
    return paths


def load_cifar(folder: Path | None) -> TrainTest:
    """Load CIFAR-10 from `folder`, with its own split; images are n x 32 x 32 x 3 bytes."""
    paths = find_cifar(folder)
    if len(paths) == 1:
        return read_npz(paths[0], _checked_cifar, _CIFAR_HINT)
    *parts, test = map(_read_cifar_batch, paths)
    images = np.concatenate([part.inputs for part in parts])
    return TrainTest(Arrays(images, np.concatenate([part.targets for part in parts])), test)


def _read_cifar_batch(path: Path) -> Arrays:
    """Read one binary batch: records of a label and the red, green and blue planes."""
    raw = np.frombuffer(content(path), np.uint8)
    if len(raw) == 0 or len(raw) % _RECORD_BYTES:
        rule = f"{len(raw):,} bytes are no whole number of records of {_RECORD_BYTES:,}"
        raise DataError(f"{path} is damaged: {rule}", hint=FETCH_AGAIN)
    records = raw.reshape(-1, _RECORD_BYTES)
    return _checked_cifar(path, records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0])


def _checked_cifar(path: Path, images: NDArray[Any], labels: NDArray[Any]) -> Arrays:
    if images.dtype != np.uint8 or images.shape[1:] not in ((32, 32, 3), (3, 32, 32)):
        found = f"{images.dtype} {images.shape}, not as bytes n x 32 x 32 x 3"
        raise DataError(f"{path} holds images as {found}", hint=_CIFAR_HINT)
    if images.shape[1] == 3:
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return labelled(path, images, labels, 10, _CIFAR_HINT)
