"""HIGGS from an .npz file, whole and broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.make import write_higgs
from thinwire.data import load_higgs
from thinwire.errors import DataError


def test_features_are_scaled_by_the_training_part(tmp_path: Path) -> None:
    write_higgs(tmp_path)
    data = load_higgs(tmp_path)
    assert data.train.inputs.shape == (40, 28)
    assert data.train.inputs.dtype == np.float32
    assert np.allclose(data.train.inputs.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(data.train.inputs.std(axis=0), 1, atol=1e-5)
    assert set(data.test.targets.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x_train", np.zeros((40, 27), np.float32), "not as n x 28 numbers"),
        ("x_test", np.full((20, 28), np.nan, np.float32), "NaN or infinity"),
        ("y_train", np.zeros(39, np.uint8), "holds 39 labels, not 40"),
        ("y_train", np.full(40, 2, np.uint8), "labels from 0 to 1"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, name: str, value: np.ndarray, words: str) -> None:
    write_higgs(tmp_path)
    with np.load(tmp_path / "higgs.npz") as file:
        arrays = {**file, name: value}
    np.savez(tmp_path / "higgs.npz", **arrays)
    with pytest.raises(DataError, match=words):
        load_higgs(tmp_path)


def test_missing_file_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no HIGGS files in") as caught:
        load_higgs(tmp_path)
    assert "x_train" in caught.value.hint
