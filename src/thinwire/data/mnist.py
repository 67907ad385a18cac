"""MNIST (or Fashion-MNIST, same format) from a folder of idx files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinwire.data.arrays import Arrays, TrainTest
from thinwire.data.files import named_folder
from thinwire.data.idx import read_idx
from thinwire.errors import DataError

# part -> (start of the name, dimensions)
_PARTS = {
    "train_images": ("train-images", 3),
    "train_labels": ("train-labels", 1),
    "test_images": ("t10k-images", 3),
    "test_labels": ("t10k-labels", 1),
}
_SUBFOLDERS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")  # the latter as torchvision lays them out
_HINT = (
    "put train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte "
    "(each plain or as .gz) into one folder and name it with --data DIR"
)


@dataclass(frozen=True, slots=True)
class MnistFiles:
    """Where the four files are."""

    train_images: Path
    train_labels: Path
    test_images: Path
    test_labels: Path


def find_mnist(folder: Path | None) -> MnistFiles:
    """The four files in `folder` or where torchvision puts them below it; DataError if one is missing."""
    folder = named_folder(folder, "MNIST", _HINT)
    best: dict[str, Path] = {}
    for subfolder in _SUBFOLDERS:
        found = _files_in(folder / subfolder)
        if len(found) > len(best):
            best = found
    missing = [_name(part) for part in _PARTS if part not in best]
    if len(missing) == len(_PARTS):
        raise DataError(f"no MNIST files in {folder}", hint=_HINT)
    if missing:
        raise DataError(f"{next(iter(best.values())).parent} lacks {', '.join(missing)}", hint=_HINT)
    return MnistFiles(**best)


def load_mnist(folder: Path | None) -> TrainTest:
    """MNIST from `folder`, with its own split; pixels are 0 to 255."""
    files = find_mnist(folder)
    return TrainTest(
        _load(files.train_images, files.train_labels), _load(files.test_images, files.test_labels)
    )


def _load(images_path: Path, labels_path: Path) -> Arrays:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise DataError(f"{images_path} holds an array of {images.shape}, not images of 28 x 28", hint=_HINT)
    if labels.ndim != 1 or len(labels) != len(images):
        raise DataError(
            f"{labels_path} holds an array of {labels.shape}, not {len(images):,} labels",
            hint=_HINT,
        )
    if len(labels) == 0 or labels.max() > 9:
        raise DataError(f"{labels_path} must hold labels from 0 to 9", hint=_HINT)
    return Arrays(images, labels.astype(np.int64))


def _name(part: str) -> str:
    stem, num_dims = _PARTS[part]
    return f"{stem}-idx{num_dims}-ubyte"


def _files_in(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for part, (stem, num_dims) in _PARTS.items():
        for separator in "-.":  # both spellings are in circulation
            for suffix in ("", ".gz"):
                path = folder / f"{stem}{separator}idx{num_dims}-ubyte{suffix}"
                if part not in found and path.is_file():
                    found[part] = path
    return found
