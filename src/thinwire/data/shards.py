"""Which worker trains on which samples of an epoch: dealt in turn in one order, or as streams of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import check, check_one_of

Remainder = Literal["drop", "repeat", "uneven"]


@dataclass(slots=True, kw_only=True)
class Shards:
    """This worker's part of every epoch, as indices; also fits a DataLoader as its `sampler`.

    The samples of an epoch have one order that follows from `seed` and the epoch alone. Workers take them
    in turn, so after every worker has taken k samples the first `k * world_size` of that order are used,
    whatever the number of workers. Hence the place in an epoch is one number, `position`, and a run can
    continue from it with another world size, repeating and losing nothing.

    >>> a, b = (Shards(num_samples=8, rank=r, world_size=2, seed=1) for r in (0, 1))
    >>> sorted([*a, *b])
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    num_samples: int
    """Samples in the whole data set."""
    rank: int = 0
    """This worker."""
    world_size: int = 1
    """Number of workers."""
    seed: int = 0
    """Seeds the permutations; the same on all workers."""
    shuffle: bool = True
    """Whether epochs are permuted at all."""
    remainder: Remainder = "drop"
    """Treatment of the samples left when the epoch does not divide by the number of workers.
    "drop": they are left out of this epoch (others of the next). "repeat": the epoch's first samples are
    used again to fill up. "uneven": the first workers get one more; use `link.join()`."""
    epoch: int = 0
    """The epoch that iteration goes through; see `set_epoch`."""
    position: int = 0
    """Samples of this epoch that all workers together have used."""
    _order: NDArray[np.int64] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self.world_size >= 1, "world_size", "at least 1", self.world_size)
        check(0 <= self.rank < self.world_size, "rank", f"from 0 to {self.world_size - 1}", self.rank)
        check_one_of("remainder", self.remainder, ("drop", "repeat", "uneven"))
        rule, hint = f"at most {self.num_samples} (one sample each)", "use fewer workers or more data"
        check(self.world_size <= self.num_samples, "world_size", rule, self.world_size, hint=hint)

    def set_epoch(self, epoch: int, *, position: int = 0) -> None:
        """Go to `epoch`, after its first `position` samples (counted over all workers)."""
        check(epoch >= 0, "epoch", "0 or more", epoch)
        check(0 <= position <= self.num_samples, "position", f"from 0 to {self.num_samples}", position)
        self.epoch, self.position, self._order = epoch, position, None

    def __len__(self) -> int:
        """Samples this worker has left in this epoch."""
        whole, extra = divmod(self.num_samples - self.position, self.world_size)
        return whole + {"drop": False, "repeat": extra > 0, "uneven": self.rank < extra}[self.remainder]

    def __iter__(self) -> Iterator[int]:
        """Iterate over the indices left. `position` stays (a DataLoader reads ahead): call `advance`."""
        return iter(self._mine().tolist())

    def batches(self, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """Yield the indices left, `batch_size` at a time (the last may be smaller).

        `position` advances as a batch is yielded: save after training on it.
        """
        check(batch_size >= 1, "batch_size", "at least 1", batch_size)
        mine = self._mine()
        for start in range(0, len(mine), batch_size):
            batch = mine[start : start + batch_size]
            self.advance(len(batch))
            yield batch

    def num_batches(self, batch_size: int) -> int:
        """Return how many batches `batches` has left."""
        return -(-len(self) // batch_size)

    def advance(self, num_samples: int) -> None:
        """Count `num_samples` more that every worker has trained on."""
        self.position = min(self.position + num_samples * self.world_size, self.num_samples)

    def _mine(self) -> NDArray[np.int64]:
        if self._order is None:  # cached: a permutation of a large data set takes a while
            generator, count = np.random.default_rng([self.seed, self.epoch]), self.num_samples
            self._order = generator.permutation(count) if self.shuffle else np.arange(count)
        left = self._order[self.position :]
        if self.remainder == "repeat" and len(left):
            left = np.concatenate([left, self._order[: -len(left) % self.world_size]])
        return left[self.rank :: self.world_size][: len(self)]

    def state_dict(self) -> dict[str, int]:
        """Return the place in the epoch; rank and world size are not part of it."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved place, with this object's own rank and world size."""
        self.seed = state["seed"]
        self.set_epoch(state["epoch"], position=state["position"])


@dataclass(slots=True, kw_only=True)
class Streams:
    """This worker's rows of every epoch, as sample indices; the counterpart of `Shards` for text.

    A sample is a piece of text; sample i+1 continues where sample i ends. In every batch a row is the piece
    after the one this row held in the batch before, so a model may carry its state from batch to batch.

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
        samples = left = np.arange(self.num_samples)
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
