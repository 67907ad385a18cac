"""Tiny data sets in the formats that the loaders read."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from tests.data.test_mnist import write_mnist

WORDS = ("the", "wire", "is", "thin", "and", "slow", "<unk>")


def write_cifar(folder: Path, *, num_train: int = 20, num_test: int = 10) -> None:
    """cifar10.npz, and the same images as binary batches in the folder of the authors' archive."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", num_train), ("test", num_test)):
        arrays[f"x_{part}"] = random.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = (np.arange(count) % 10).astype(np.uint8)
    np.savez(folder / "cifar10.npz", **arrays)  # type: ignore[arg-type]  # mypy: ** into allow_pickle
    batches = folder / "cifar-10-batches-bin"
    batches.mkdir()
    planes = {part: arrays[f"x_{part}"].transpose(0, 3, 1, 2).reshape(-1, 3072) for part in ("train", "test")}
    records = {
        part: np.concatenate([arrays[f"y_{part}"][:, None], planes[part]], axis=1)
        for part in ("train", "test")
    }
    for number, rows in enumerate(np.array_split(records["train"], 5), start=1):
        (batches / f"data_batch_{number}.bin").write_bytes(rows.tobytes())
    (batches / "test_batch.bin").write_bytes(records["test"].tobytes())


def write_text(folder: Path, *, num_train: int = 1500, num_test: int = 400, packed: bool = True) -> None:
    """ptb.train.txt and ptb.test.txt with about as many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for part, count in (("train", num_train), ("test", num_test)):
        words = random.choice(WORDS, size=count)
        lines = [" " + " ".join(words[start : start + 9]) + " \n" for start in range(0, count, 9)]
        content = "".join(lines).encode()
        name = f"ptb.{part}.txt" + ".gz" * packed
        (folder / name).write_bytes(gzip.compress(content) if packed else content)


def write_higgs(folder: Path, *, num_train: int = 40, num_test: int = 20) -> None:
    """higgs.npz whose label can be learned."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", num_train), ("test", num_test)):
        features = random.normal(size=(count, 28)).astype(np.float32)
        arrays[f"x_{part}"], arrays[f"y_{part}"] = features * 3 + 1, (features[:, 0] > 0).astype(np.uint8)
    np.savez(folder / "higgs.npz", **arrays)  # type: ignore[arg-type]  # mypy: ** into allow_pickle


def write_all(folder: Path) -> None:
    """The data of every recipe in one folder."""
    write_mnist(folder)
    write_cifar(folder)
    write_text(folder)
    write_higgs(folder)
