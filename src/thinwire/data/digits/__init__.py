"""Digits: 1,797 real handwritten digits, 8 x 8, inside the package (see README.md in this folder)."""

from __future__ import annotations

from importlib import resources

import numpy as np

from thinwire.data.arrays import Arrays, TrainTest

__all__ = ["load_digits"]


def load_digits() -> TrainTest:
    """The digits with their fixed split; pixels are 0 to 16.

    >>> data = load_digits()
    >>> len(data.train), len(data.test), data.train.inputs.shape[1:]
    (1437, 360, (8, 8))
    """
    with resources.files(__name__).joinpath("digits.npz").open("rb") as file, np.load(file) as stored:
        images, labels, is_test = stored["images"], stored["labels"].astype(np.int64), stored["is_test"]
    return TrainTest(Arrays(images[~is_test], labels[~is_test]), Arrays(images[is_test], labels[is_test]))
