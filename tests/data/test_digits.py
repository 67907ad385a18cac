"""The digits inside the package."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.data import load_digits


def test_split_is_fixed_stratified_and_without_overlap() -> None:
    data = load_digits()
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert np.bincount(data.test.targets).tolist() == [36] * 10
    assert data.train.inputs.dtype == np.uint8
    assert data.train.inputs.max() == 16
    train = {image.tobytes() for image in data.train.inputs}
    assert not any(image.tobytes() in train for image in data.test.inputs)


def test_it_is_scikit_learns() -> None:
    from sklearn.datasets import load_digits as load_source

    source = load_source()
    data = load_digits()
    ours = np.concatenate([data.train.inputs, data.test.inputs]).reshape(1797, 64)
    labels = np.concatenate([data.train.targets, data.test.targets])
    theirs = source.data.astype(np.uint8)
    assert sorted(map(_key, ours, labels)) == sorted(map(_key, theirs, source.target))


def _key(image: NDArray[np.uint8], label: int) -> tuple[bytes, int]:
    return image.tobytes(), int(label)
