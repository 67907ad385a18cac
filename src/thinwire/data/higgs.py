"""HIGGS: collisions described by 28 numbers, signal or background, from arrays in an .npz file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.arrays import Arrays, TrainTest
from thinwire.data.files import first_file, named_folder, read_npz
from thinwire.errors import DataError

NUM_FEATURES = 28
_HINT = (
    "put higgs.npz with the arrays x_train, x_test (n x 28 numbers) and y_train, y_test (0 or 1), cut from "
    "HIGGS.csv of the UCI repository, into a folder and name it with --data DIR"
)


def find_higgs(folder: Path | None) -> Path:
    """The file in `folder`; DataError if it is missing."""
    folder = named_folder(folder, "HIGGS", _HINT)
    path = first_file(folder, ("", "higgs"), ("higgs.npz", "HIGGS.npz"))
    if path is None:
        raise DataError(f"no higgs.npz in {folder}", hint=_HINT)
    return path


def load_higgs(folder: Path | None) -> TrainTest:
    """HIGGS from `folder`, each feature scaled to mean 0 and deviation 1 over the training part."""
    path = find_higgs(folder)
    arrays = read_npz(path, ("x_train", "y_train", "x_test", "y_test"), _HINT)
    train = _checked(path, arrays["x_train"], arrays["y_train"])
    test = _checked(path, arrays["x_test"], arrays["y_test"])
    mean, deviation = train.inputs.mean(axis=0), train.inputs.std(axis=0)
    deviation[deviation == 0] = 1

    def scaled(part: Arrays) -> Arrays:
        return Arrays(((part.inputs - mean) / deviation).astype(np.float32), part.targets)

    return TrainTest(scaled(train), scaled(test))


def _checked(path: Path, features: NDArray[Any], labels: NDArray[Any]) -> Arrays:
    if features.ndim != 2 or features.shape[1] != NUM_FEATURES or features.dtype.kind not in "fiu":
        raise DataError(
            f"{path} holds features as {features.dtype} {features.shape}, not as n x {NUM_FEATURES} numbers",
            hint=_HINT,
        )
    if labels.size != len(features) or len(features) == 0:
        raise DataError(f"{path} holds {len(features):,} rows but {labels.size:,} labels", hint=_HINT)
    if not np.isfinite(features).all():
        raise DataError(f"{path} holds NaN or infinity", hint=_HINT)
    if not np.isin(labels, (0, 1)).all():
        raise DataError(f"{path} must hold labels 0 and 1", hint=_HINT)
    return Arrays(features.astype(np.float32), labels.reshape(-1).astype(np.int64))
