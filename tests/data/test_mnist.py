"""Reading MNIST's files, whole and broken; tiny ones are made here."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from thinwire.data.files import load_mnist, read_idx
from thinwire.errors import DataError

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, *, packed: bool = True, num_train: int = 20, num_test: int = 10) -> None:
    """A tiny data set in MNIST's format."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for images, labels, count in ((*NAMES[:2], num_train), (*NAMES[2:], num_test)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        for name, array in ((images, pixels), (labels, (np.arange(count) % 10).astype(np.uint8))):
            content = gzip.compress(idx(array)) if packed else idx(array)
            (folder / (name + ".gz" * packed)).write_bytes(content)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("where", [".", "raw", "MNIST/raw"])
def test_reads_plain_and_packed_files_where_people_have_them(
    tmp_path: Path, packed: bool, where: str
) -> None:
    write_mnist(tmp_path / where, packed=packed)
    data = load_mnist(tmp_path)
    assert data.train.inputs.shape == (20, 28, 28)
    assert data.test.targets.tolist() == list(range(10))


def test_reads_an_unpacked_file_that_kept_its_gz_name_and_dotted_names(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=False)
    (tmp_path / NAMES[0]).rename(tmp_path / (NAMES[0] + ".gz"))
    (tmp_path / NAMES[1]).rename(tmp_path / "train-labels.idx1-ubyte")
    assert len(load_mnist(tmp_path).train) == 20


def test_no_folder_says_what_to_put_where() -> None:
    with pytest.raises(DataError, match="no folder was named") as caught:
        load_mnist(None)
    assert all(name in caught.value.hint for name in NAMES)
    assert "--data DIR" in caught.value.hint


def test_missing_folder_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_mnist(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no MNIST files in"):
        load_mnist(tmp_path)
    write_mnist(tmp_path / "raw")
    (tmp_path / "raw" / (NAMES[3] + ".gz")).unlink()
    with pytest.raises(DataError, match="raw lacks t10k-labels-idx1-ubyte"):
        load_mnist(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        load_mnist(tmp_path / "raw" / (NAMES[0] + ".gz"))


WHOLE = idx(np.zeros((2, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not an idx file"),
        (b"<html>not found</html>", "not an idx file"),
        (b"\0\0\x0d\x01" + bytes(8), "type 0x0d"),
        (WHOLE[:9], "cut off inside its header"),
        (WHOLE[:-1], "damaged: 2 x 28 x 28 need 1,584 bytes, it has 1,583"),
        (WHOLE + b"\0", "damaged"),
        (gzip.compress(WHOLE, mtime=0)[:-12], "damaged"),
        (gzip.compress(WHOLE, mtime=0)[:12] + b"garbage" + gzip.compress(WHOLE, mtime=0)[19:], "damaged"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / NAMES[0]
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        read_idx(path)
    assert str(path) in caught.value.message


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=False)
    (tmp_path / NAMES[1]).write_bytes(idx(np.zeros(19, np.uint8)))
    with pytest.raises(DataError, match="not 20 labels"):
        load_mnist(tmp_path)
    (tmp_path / NAMES[1]).write_bytes(idx(np.full(20, 10, np.uint8)))
    with pytest.raises(DataError, match="labels from 0 to 9"):
        load_mnist(tmp_path)
    (tmp_path / NAMES[0]).write_bytes(idx(np.zeros((20, 8, 8), np.uint8)))
    with pytest.raises(DataError, match="not images of 28 x 28"):
        load_mnist(tmp_path)
