"""CIFAR-10 as arrays and as binary batches, whole and broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.make import write_cifar
from thinwire.data import load_cifar
from thinwire.errors import DataError


def test_arrays_and_binary_batches_hold_the_same_images(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    from_arrays = load_cifar(tmp_path)
    (tmp_path / "cifar10.npz").unlink()
    from_batches = load_cifar(tmp_path)
    assert from_arrays.train.inputs.shape == (20, 32, 32, 3)
    for one, other in ((from_arrays.train, from_batches.train), (from_arrays.test, from_batches.test)):
        assert np.array_equal(one.inputs, other.inputs)
        assert np.array_equal(one.targets, other.targets)


def test_colours_first_and_labels_in_a_column_are_understood(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    usual = load_cifar(tmp_path)
    with np.load(tmp_path / "cifar10.npz") as file:
        arrays = dict(file)
    for part in ("train", "test"):
        arrays[f"x_{part}"] = arrays[f"x_{part}"].transpose(0, 3, 1, 2)
        arrays[f"y_{part}"] = arrays[f"y_{part}"][:, None]
    np.savez(tmp_path / "cifar10.npz", **arrays)
    turned = load_cifar(tmp_path)
    assert np.array_equal(turned.train.inputs, usual.train.inputs)
    assert np.array_equal(turned.test.targets, usual.test.targets)


def test_what_is_missing_is_named_with_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no CIFAR-10 files in") as caught:
        load_cifar(tmp_path)
    assert "cifar10.npz" in caught.value.hint
    assert "--data DIR" in caught.value.hint
    with pytest.raises(DataError, match="no folder was named"):
        load_cifar(None)
    write_cifar(tmp_path)
    (tmp_path / "cifar10.npz").unlink()
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-bin lacks data_batch_3.bin"):
        load_cifar(tmp_path)


IMAGES = np.zeros((2, 32, 32, 3), np.uint8)
LABELS = np.zeros(2, np.uint8)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES}, "lacks y_test; it holds"),
        ({"x_train": IMAGES.astype(np.float32)}, "images as float32"),
        ({"x_train": IMAGES[:, :16]}, "not as bytes n x 32 x 32 x 3"),
        ({"y_train": LABELS[:1]}, "holds 1 labels, not 2"),
        ({"y_test": LABELS + 10}, "labels from 0 to 9"),
        ({"y_test": np.array([object(), object()])}, "no .npz file of plain arrays"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    usual = {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES, "y_test": LABELS}
    chosen = arrays if len(arrays) > 1 else {**usual, **arrays}
    np.savez(tmp_path / "cifar10.npz", **chosen)  # type: ignore[arg-type]  # mypy: ** into allow_pickle
    with pytest.raises(DataError, match=words) as caught:
        load_cifar(tmp_path)
    assert "cifar10.npz" in caught.value.message


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    whole = (tmp_path / "cifar10.npz").read_bytes()
    for broken in (b"", b"<html>not found</html>", whole[: len(whole) // 2]):
        (tmp_path / "cifar10.npz").write_bytes(broken)
        with pytest.raises(DataError, match=r"cifar10.npz is damaged or no .npz file"):
            load_cifar(tmp_path)
    (tmp_path / "cifar10.npz").unlink()
    batch = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    batch.write_bytes(batch.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_2.bin is damaged: 12,291 bytes"):
        load_cifar(tmp_path)
