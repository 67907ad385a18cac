"""Word-level text as one long row of token numbers; the vocabulary is that of the training text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.data.files import AGAIN, content, first_file, named_folder
from thinwire.errors import DataError

MAX_WORDS = 10_000
"""Size of the vocabulary: rarer words of the training text, and unknown ones, become `UNKNOWN`."""
END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"
_SUBFOLDERS = ("", "ptb", "wikitext-2")
_HINT = (
    "put ptb.train.txt and ptb.test.txt (or train.txt and test.txt of any text, words separated by spaces; "
    "each plain or as .gz) into one folder and name it with --data DIR"
)


@dataclass(frozen=True, slots=True)
class TokenFiles:
    """Where the texts are."""

    train: Path
    test: Path


@dataclass(frozen=True, slots=True)
class Tokens:
    """A training and a test text as numbers below `len(words)`."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    words: tuple[str, ...]
    """Token number to word, frequent ones first."""


def find_tokens(folder: Path | None) -> TokenFiles:
    """The two texts in `folder` or in ptb/ below it; DataError if one is missing."""
    folder = named_folder(folder, "text", _HINT)
    found = {part: first_file(folder, _SUBFOLDERS, _names(part)) for part in ("train", "test")}
    train, test = found["train"], found["test"]
    if train is None and test is None:
        raise DataError(f"no text files in {folder}", hint=_HINT)
    if train is None or test is None:
        lacking = "train" if train is None else "test"
        raise DataError(f"{folder} lacks ptb.{lacking}.txt", hint=_HINT)
    return TokenFiles(train, test)


def load_tokens(folder: Path | None) -> Tokens:
    """Both texts of `folder`; the end of each line is a token too."""
    files = find_tokens(folder)
    train, test = _words(files.train), _words(files.test)
    common = [word for word, _ in Counter(train).most_common(MAX_WORDS)]
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
        raise DataError(f"{path} is not a text in UTF-8: {error}", hint=AGAIN) from error
    words = text.replace("\n", f" {END_OF_LINE} ").split()
    if len(words) < 2:
        raise DataError(f"{path} holds no words", hint=_HINT)
    return words


def _names(part: str) -> list[str]:
    stems = (f"ptb.{part}.txt", f"{part}.txt", f"wiki.{part}.tokens")
    return [stem + suffix for stem in stems for suffix in ("", ".gz")]
