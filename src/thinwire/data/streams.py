"""Who reads which part of a long text: contiguous streams, one per row of the global batch.

A sample is a piece of text; sample i+1 goes on where sample i ends. In every batch a row is the piece after
the one this row held in the batch before, so a model may carry its state from batch to batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import SettingError, check


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
    """Rows and batches done, for each global batch size that this epoch was read with before."""
    position: int = 0
    """Samples of this epoch that all workers together have used up since the last entry of `past`."""
    _rows: int = 0
    """Rows that `position` counts."""

    def __post_init__(self) -> None:
        check(self.world_size >= 1, "world_size", "at least 1", self.world_size)
        check(0 <= self.rank < self.world_size, "rank", f"from 0 to {self.world_size - 1}", self.rank)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`."""
        check(epoch >= 0, "epoch", "0 or more", epoch)
        self.epoch, self.past, self.position = epoch, [], 0

    def batches(self, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """The batches left of this worker, one sample per row.

        `position` moves on as a batch is handed out: what is saved after its step does not repeat it.
        """
        table = self._table(batch_size)
        done = self.position // len(table)
        mine = table[self.rank * batch_size : (self.rank + 1) * batch_size]
        for column in range(done, table.shape[1]):
            self.position += len(table)
            yield mine[:, column]

    def num_batches(self, batch_size: int) -> int:
        """How many batches `batches` has left."""
        rows, length = self._table(batch_size).shape
        return int(length) - self.position // int(rows)

    def _table(self, batch_size: int) -> NDArray[np.int64]:
        """Sample indices by row of the global batch and by batch."""
        check(batch_size >= 1, "batch_size", "at least 1", batch_size)
        rows = self.world_size * batch_size
        if self.position and rows != self._rows:
            self.past, self.position = [*self.past, (self._rows, self.position // self._rows)], 0
        self._rows = rows
        left = np.arange(self.num_samples)
        for past_rows, num_done in self.past:
            table = _cut(left, past_rows)
            left = np.concatenate([table[:, num_done:].reshape(-1), left[table.size :]])
        table = _cut(left, rows)
        if table.size == 0 and not self.past:
            raise SettingError(
                f"batch_size must be at most {self.num_samples // self.world_size} (one sample a row), "
                f"got {batch_size}",
                hint="use fewer workers, a smaller batch or more text",
            )
        return table

    def state_dict(self) -> dict[str, Any]:
        """What must survive a stop; rank and world size are not part of it."""
        done = self.position // self._rows if self._rows else 0
        return {"epoch": self.epoch, "past": [*self.past, (self._rows, done)] if done else list(self.past)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place. With the same global batch size each row goes on with its text; with
        another, what is left of all rows is cut anew, so that nothing is read twice."""
        self.set_epoch(state["epoch"])
        past = [(int(rows), int(done)) for rows, done in state["past"]]
        if past:
            self.past, (self._rows, done) = past[:-1], past[-1]
            self.position = self._rows * done


def _cut(samples: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    length = len(samples) // rows
    return samples[: rows * length].reshape(rows, length)
