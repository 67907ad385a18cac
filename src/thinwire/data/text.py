"""Word-level text: one long row of token numbers, and which worker reads which part of it.

A sample is a piece of text; sample i+1 continues where sample i ends. In every batch of a stream a row is the
piece after the one this row held in the batch before, so a model may carry its state from batch to batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data.files import FETCH_AGAIN, content, find_files
from thinwire.errors import DataError, check

MAX_WORDS = 10_000
"""Size of the vocabulary: rarer words of the training text, and unknown ones, become `UNKNOWN`."""
END_OF_LINE = "<eos>"
UNKNOWN = "<unk>"
_HINT = (
    "put ptb.train.txt and ptb.test.txt (or train.txt and test.txt of any text, words separated by spaces; "
    "each plain or as .gz) into one folder and name it with --data DIR"
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A training and a test text as numbers below `len(words)`; the words are those of the training text."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    words: tuple[str, ...]
    """Token number to word, frequent ones first."""


def find_tokens(folder: Path | None) -> list[Path]:
    """Return the training and the test text in `folder` or below it; DataError if one is missing."""
    stems = [(f"ptb.{part}.txt", f"{part}.txt", f"wiki.{part}.tokens") for part in ("train", "test")]
    files = [[stem + suffix for stem in names for suffix in ("", ".gz")] for names in stems]
    return find_files(folder, "text", _HINT, ("ptb", "wikitext-2"), files)


def load_tokens(folder: Path | None) -> Tokens:
    """Load both texts of `folder`; the end of each line is a token too."""
    train, test = map(_words, find_tokens(folder))
    common = [word for word, _ in Counter(train).most_common(MAX_WORDS)]  # the test text adds no words
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
        raise DataError(f"{path} is not a text in UTF-8: {error}", hint=FETCH_AGAIN) from error
    words = text.replace("\n", f" {END_OF_LINE} ").split()
    if len(words) < 2:
        raise DataError(f"{path} holds no words", hint=_HINT)
    return words


@dataclass(slots=True, kw_only=True)
class Streams:
    """This worker's rows of every epoch, as sample indices; the counterpart of `Shards` for text.

    The samples are cut into as many streams of equal length as the global batch has rows, and each worker
    owns `batch_size` of them. So the streams depend on the global batch size alone: two workers with 10 rows
    each read what one worker with 20 rows reads. Samples left at the end, less than one a row, are not used.

    >>> a, b = (Streams(num_samples=9, rank=r, world_size=2) for r in (0, 1))
    >>> [batch.tolist() for batch in a.batches(1)], [batch.tolist() for batch in b.batches(1)]
    ([[0], [1], [2], [3]], [[4], [5], [6], [7]])
    """

    num_samples: int
    """Samples in the whole text."""
    rank: int = 0
    """This worker."""
    world_size: int = 1
    """Number of workers."""
    epoch: int = 0
    """The epoch that iteration goes through; all are alike."""
    past: list[tuple[int, int]] = field(default_factory=list)
    """Rows and batches read, for each global batch size of this epoch."""

    def __post_init__(self) -> None:
        check(self.world_size >= 1, "world_size", "at least 1", self.world_size)
        check(0 <= self.rank < self.world_size, "rank", f"from 0 to {self.world_size - 1}", self.rank)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`."""
        check(epoch >= 0, "epoch", "0 or more", epoch)
        self.epoch, self.past = epoch, []

    def batches(self, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """Yield this worker's batches left, one sample per row.

        The place in the epoch advances as a batch is yielded: save after training on it.
        """
        left = self._left(batch_size)
        *before, (rows, done) = self.past
        for batch in left[self.rank * batch_size : (self.rank + 1) * batch_size].T:
            done += 1
            self.past = [*before, (rows, done)]
            yield batch

    def num_batches(self, batch_size: int) -> int:
        """Return how many batches `batches` has left."""
        return int(self._left(batch_size).shape[1])

    def _left(self, batch_size: int) -> NDArray[np.int64]:
        """Return the sample indices left, by row of the global batch and by batch."""
        check(batch_size >= 1, "batch_size", "at least 1", batch_size)
        rows = self.world_size * batch_size
        self.past = [each for each in self.past if each[1]]
        # if the global batch size has changed within the epoch, what is left is cut into other streams
        if not self.past or self.past[-1][0] != rows:
            self.past.append((rows, 0))
        samples = np.arange(self.num_samples)
        for cut_rows, num_done in self.past:
            size = len(samples) // cut_rows * cut_rows
            left = samples[:size].reshape(cut_rows, -1)[:, num_done:]
            samples = np.concatenate([left.reshape(-1), samples[size:]])
        rule = f"at most {self.num_samples // self.world_size} (one sample a row)"
        hint = "use fewer workers, a smaller batch or more text"
        check(rows <= self.num_samples or len(self.past) > 1, "batch_size", rule, batch_size, hint=hint)
        return left

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch; rank and world size are not part of it."""
        return {"epoch": self.epoch, "past": [each for each in self.past if each[1]]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved place. With the same global batch size each row continues its text; with
        another, what is left of all rows is cut anew, so that nothing is read twice."""
        self.set_epoch(state["epoch"])
        self.past = [(int(rows), int(done)) for rows, done in state["past"]]
