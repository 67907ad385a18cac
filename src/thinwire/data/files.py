"""Data sets: digits inside the package; MNIST, CIFAR-10, HIGGS and word-level text from a folder."""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import DataError

FETCH_AGAIN = "fetch the file again and compare its size or checksum with the source's"
MAX_WORDS = 10_000
"""Size of the vocabulary: rarer words of the training text, and unknown ones, become `UNKNOWN`."""
END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"
_MNIST_NAMES = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]
_MNIST_HINT = (
    f"put {', '.join(_MNIST_NAMES[:3])} and {_MNIST_NAMES[3]} (each plain or as .gz) into one folder and "
    "name it with --data DIR"
)
_CIFAR_BATCHES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
_CIFAR_HINT = (
    "put cifar10.npz with the arrays x_train, y_train, x_test, y_test (images as bytes, n x 32 x 32 x 3), or "
    "data_batch_1.bin to data_batch_5.bin and test_batch.bin of cifar-10-binary.tar.gz, into one folder and "
    "name it with --data DIR"
)
_HIGGS_FEATURES = 28
_HIGGS_HINT = (
    "put higgs.npz with the arrays x_train, x_test (n x 28 numbers) and y_train, y_test (0 or 1), cut from "
    "HIGGS.csv of the UCI repository, into a folder and name it with --data DIR"
)
_TEXT_HINT = (
    "put ptb.train.txt and ptb.test.txt (or train.txt and test.txt of any text, words separated by spaces; "
    "each plain or as .gz) into one folder and name it with --data DIR"
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


@dataclass(frozen=True, slots=True)
class Tokens:
    """A training and a test text as numbers below `len(words)`; the words are those of the training text."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    words: tuple[str, ...]
    """Token number to word, frequent ones first."""


def find_files(
    folder: Path | None, what: str, hint: str, below: Sequence[str], *sets: Sequence[Sequence[str]]
) -> list[Path]:
    """Return the files of the fullest of `sets`, all in `folder` or all in one of the folders `below` it.

    Each file of a set is given by the names it may have. DataError says what is missing.
    """
    if folder is None:
        raise DataError(f"{what} is not part of the package, and no folder was named", hint=hint)
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"the data folder {folder} {reason}", hint=hint)
    places = [folder / each for each in ("", *below)]
    choices = [{file[0]: _first_file(place, file) for file in files} for files in sets for place in places]
    fullest = max(choices, key=lambda paths: sum(map(bool, paths.values())) / len(paths))
    found = [path for path in fullest.values() if path]
    if not found:
        raise DataError(f"no {what} files in {folder}", hint=hint)
    if missing := [name for name, path in fullest.items() if path is None]:
        raise DataError(f"{found[0].parent} lacks {', '.join(missing)}", hint=hint)
    return found


def _first_file(folder: Path, names: Sequence[str]) -> Path | None:
    return next((path for name in names if (path := folder / name).is_file()), None)


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


def _labelled(path: Path, inputs: NDArray[Any], labels: NDArray[Any], num_classes: int, hint: str) -> Arrays:
    labels = labels.reshape(-1)  # some have them as a column
    if len(labels) != len(inputs):
        raise DataError(f"{path} holds {len(labels):,} labels, not {len(inputs):,} labels", hint=hint)
    if len(labels) == 0 or not np.isin(labels, range(num_classes)).all():
        raise DataError(f"{path} must hold labels from 0 to {num_classes - 1}", hint=hint)
    return Arrays(inputs, labels.astype(np.int64))


def _read_npz(
    path: Path, checked: Callable[[Path, NDArray[Any], NDArray[Any]], Arrays], hint: str
) -> TrainTest:
    """Read x_train, y_train, x_test and y_test, each pair through `checked`; nothing pickled is loaded."""
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


def find_mnist(folder: Path | None) -> list[Path]:
    """Return the four files, train images and labels, test images and labels; DataError if one is missing."""
    # with a dash or a dot: both are in circulation
    spellings = [(name, name.replace("-idx", ".idx")) for name in _MNIST_NAMES]
    files = [[name + suffix for name in names for suffix in ("", ".gz")] for names in spellings]
    below = ("raw", "MNIST/raw", "FashionMNIST/raw")  # as torchvision lays them out
    return find_files(folder, "MNIST", _MNIST_HINT, below, files)


def load_mnist(folder: Path | None) -> TrainTest:
    """Load MNIST, or Fashion-MNIST, from `folder`, with its own split; pixels are 0 to 255."""
    train_images, train_labels, test_images, test_labels = find_mnist(folder)
    return TrainTest(_load_mnist(train_images, train_labels), _load_mnist(test_images, test_labels))


def _load_mnist(images_path: Path, labels_path: Path) -> Arrays:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.shape[1:] != (28, 28):
        message = f"{images_path} holds an array of {images.shape}, not images of 28 x 28"
        raise DataError(message, hint=_MNIST_HINT)
    return _labelled(labels_path, images, labels, 10, _MNIST_HINT)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, plain or as .gz: a magic number, the sizes, then the bytes."""
    raw = content(path)

    def wrong(reason: str) -> DataError:
        return DataError(f"{path} {reason}", hint=FETCH_AGAIN)

    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise wrong("is not an idx file: it does not start with two zero bytes")
    kind, num_dims = raw[2], raw[3]
    if kind != 0x08:
        raise wrong(f"holds type 0x{kind:02x}, only unsigned bytes (0x08) can be read")
    start = 4 + 4 * num_dims
    if len(raw) < start:
        raise wrong(f"is cut off inside its header ({len(raw)} bytes)")
    shape = struct.unpack_from(f">{num_dims}I", raw, 4)
    expected = start + math.prod(shape)
    if len(raw) != expected:
        sizes = " x ".join(map(str, shape))
        raise wrong(f"is damaged: {sizes} need {expected:,} bytes, it has {len(raw):,}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def find_cifar(folder: Path | None) -> list[Path]:
    """Return one .npz file, or the binary batches with the test batch last; DataError if one is missing."""
    npz, batches = [("cifar10.npz", "cifar-10.npz")], [(name,) for name in _CIFAR_BATCHES]
    return find_files(folder, "CIFAR-10", _CIFAR_HINT, ("cifar-10-batches-bin", "cifar10"), npz, batches)


def load_cifar(folder: Path | None) -> TrainTest:
    """Load CIFAR-10 from `folder`, with its own split; images are n x 32 x 32 x 3 bytes."""
    paths = find_cifar(folder)
    if len(paths) == 1:
        return _read_npz(paths[0], _checked_cifar, _CIFAR_HINT)
    *parts, test = map(_read_cifar_batch, paths)
    images = np.concatenate([part.inputs for part in parts])
    return TrainTest(Arrays(images, np.concatenate([part.targets for part in parts])), test)


def _read_cifar_batch(path: Path) -> Arrays:
    """Read one binary batch: records of a label and the red, green and blue planes."""
    raw = np.frombuffer(content(path), np.uint8)
    if len(raw) == 0 or len(raw) % _CIFAR_RECORD_BYTES:
        rule = f"{len(raw):,} bytes are no whole number of records of {_CIFAR_RECORD_BYTES:,}"
        raise DataError(f"{path} is damaged: {rule}", hint=FETCH_AGAIN)
    records = raw.reshape(-1, _CIFAR_RECORD_BYTES)
    return _checked_cifar(path, records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0])


def _checked_cifar(path: Path, images: NDArray[Any], labels: NDArray[Any]) -> Arrays:
    if images.dtype != np.uint8 or images.shape[1:] not in ((32, 32, 3), (3, 32, 32)):
        found = f"{images.dtype} {images.shape}, not as bytes n x 32 x 32 x 3"
        raise DataError(f"{path} holds images as {found}", hint=_CIFAR_HINT)
    if images.shape[1] == 3:
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return _labelled(path, images, labels, 10, _CIFAR_HINT)


def find_higgs(folder: Path | None) -> Path:
    """Return the file in `folder`; DataError if it is missing."""
    return find_files(folder, "HIGGS", _HIGGS_HINT, ("higgs",), [("higgs.npz", "HIGGS.npz")])[0]


def load_higgs(folder: Path | None) -> TrainTest:
    """Load HIGGS from `folder`: collisions described by 28 numbers, signal or background.

    Each feature is scaled to mean 0 and deviation 1 over the training part.
    """
    data = _read_npz(find_higgs(folder), _checked_higgs, _HIGGS_HINT)
    mean, deviation = data.train.inputs.mean(axis=0), data.train.inputs.std(axis=0)
    deviation[deviation == 0] = 1  # a constant feature
    scaled = [((part.inputs - mean) / deviation).astype(np.float32) for part in (data.train, data.test)]
    return TrainTest(Arrays(scaled[0], data.train.targets), Arrays(scaled[1], data.test.targets))


def _checked_higgs(path: Path, features: NDArray[Any], labels: NDArray[Any]) -> Arrays:
    if features.shape[1:] != (_HIGGS_FEATURES,) or features.dtype.kind not in "fiu":
        found = f"{features.dtype} {features.shape}, not as n x {_HIGGS_FEATURES} numbers"
        raise DataError(f"{path} holds features as {found}", hint=_HIGGS_HINT)
    if not np.isfinite(features).all():
        raise DataError(f"{path} holds NaN or infinity", hint=_HIGGS_HINT)
    return _labelled(path, features.astype(np.float32), labels, 2, _HIGGS_HINT)


def find_tokens(folder: Path | None) -> list[Path]:
    """Return the training and the test text in `folder` or below it; DataError if one is missing."""
    stems = [(f"ptb.{part}.txt", f"{part}.txt", f"wiki.{part}.tokens") for part in ("train", "test")]
    files = [[stem + suffix for stem in names for suffix in ("", ".gz")] for names in stems]
    return find_files(folder, "text", _TEXT_HINT, ("ptb", "wikitext-2"), files)


def load_tokens(folder: Path | None) -> Tokens:
    """Load both texts of `folder`; the end of each line is a token too."""
    train, test = map(_words, find_tokens(folder))
    common = [word for word, _ in Counter(train).most_common(MAX_WORDS)]  # the test text adds no words
    if UNKNOWN not in common:
        common = [*common[: MAX_WORDS - 1], UNKNOWN]
    numbers = {word: number for number, word in enumerate(common)}
    unknown = numbers[UNKNOWN]

    def encoded(words: list[str]) -> NDArray[np.int64]:
        return np.fromiter((numbers.get(word, unknown) for word in words), np.int64, len(words))

    return Tokens(encoded(train), encoded(test), tuple(common))


def _words(path: Path) -> list[str]:
    try:
        text = content(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text in UTF-8: {error}", hint=FETCH_AGAIN) from error
    words = text.replace("\n", f" {END_OF_LINE} ").split()
    if len(words) < 2:
        raise DataError(f"{path} holds no words", hint=_TEXT_HINT)
    return words
