"""Small files for scripts that read their data: texts, tokens and waves that can be learned."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch


def words(num_words: int) -> list[str]:
    """A text in which every word says a lot about the next."""
    generator = np.random.default_rng(0)
    follows = generator.integers(0, 26, (26, 2))
    word, words = 0, []
    for choice in generator.integers(0, 2, num_words):
        word = int(follows[word, choice])
        words.append(chr(ord("a") + word))
    return words


def input_text(folder: Path) -> None:
    (folder / "input.txt").write_text("".join(words(4000)))


def token_files(folder: Path) -> None:
    data = folder / "data" / "tiny"
    data.mkdir(parents=True)
    tokens = np.array([ord(word) - ord("a") for word in words(5000)], dtype=np.uint16)
    tokens[:4000].tofile(data / "train.bin")
    tokens[4000:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 26}))


def corpus(folder: Path) -> None:
    data = folder / "data" / "wikitext-2"
    data.mkdir(parents=True)
    for part, size in (("train", 1400), ("valid", 300), ("test", 300)):
        every = words(size)
        lines = (" ".join(every[start : start + 10]) for start in range(0, size, 10))
        (data / f"{part}.txt").write_text("\n".join(lines))


def sine_waves(folder: Path) -> None:
    starts = np.random.default_rng(2).integers(-80, 80, (19, 1))
    torch.save(np.sin((np.arange(40) + starts) / 20.0), folder / "traindata.pt")


def results_folder(folder: Path) -> None:
    (folder / "results").mkdir()
