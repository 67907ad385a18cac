"""Which worker trains on which samples: one permutation per epoch, the same on all workers, dealt in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

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
