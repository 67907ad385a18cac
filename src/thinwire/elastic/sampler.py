"""Which worker trains on which samples while workers come and go: every sample of an epoch exactly once.

An epoch has one order that follows from seed and epoch alone. What is left of it when the world changes is
dealt anew; batches that were drawn and not trained on count as left. A few numbers say what is left, so that
whoever joins finds out for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import check, check_count

Samples = NDArray[np.int64]


def split(count: int, parts: int) -> list[int]:
    """Cut a count into parts that differ by at most one, larger ones first."""
    whole, extra = divmod(count, parts)
    return [whole + (part < extra) for part in range(parts)]


def deal(count: int, world_size: int, step_size: int) -> list[list[int]]:
    """How many of `count` samples each worker gets in each step, up to `step_size` for all together.

    Every worker gets at least one in every step. A rest smaller than the number of workers is shared out
    with the last full step; without one it stays, for the next epoch.
    """
    full, rest = divmod(count, step_size)
    totals = [step_size] * full
    if rest >= world_size:
        totals.append(rest)
    elif rest and totals and step_size + rest >= 2 * world_size:
        totals[-1:] = split(step_size + rest, 2)
    return [split(total, world_size) for total in totals]


class ElasticSampler:
    """This worker's batches, as lists of indices; give it to a DataLoader as its `batch_sampler`.

    >>> a, b = (ElasticSampler(num_samples=10, batch_size=2, seed=1) for _ in range(2))
    >>> a.place(0, 2); b.place(1, 2)
    >>> sorted(sum([*a, *b], []))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self,
        *,
        num_samples: int,
        batch_size: int,
        fixed: str = "worker",
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """`batch_size` is that of a worker, or with fixed="global" that of all workers together."""
        check_count("num_samples", num_samples, "samples")
        check_count("batch_size", batch_size, "samples")
        check(fixed in ("worker", "global"), "fixed", "'worker' or 'global'", fixed)
        self.num_samples, self.batch_size, self.fixed = num_samples, batch_size, fixed
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0
        self.taken = 0
        """Batches that this worker has trained on since its share was last dealt."""
        self.rank, self.world_size = 0, 1
        self._carried: list[int] = []
        """Samples of the last epoch that were too few for all workers: the first of this one."""
        self._past: list[tuple[int, list[int]]] = []
        """For each world of this epoch before this one: its step size, and batches done by each worker."""
        self._cached: Samples | None = None
        self._dealt: list[list[int]] | None = None
        """What `deal` makes of `left`: it is the same for all steps of a world."""

    # -- the share of this worker -----------------------------------------------------------------------

    def place(self, rank: int, world_size: int) -> None:
        """Which of how many workers this one is from now on."""
        rule = f"{world_size} or more, the number of workers"
        check(self.fixed == "worker" or self.batch_size >= world_size, "batch_size", rule, self.batch_size)
        self.rank, self.world_size, self.taken = rank, world_size, 0
        self._dealt = None

    def __len__(self) -> int:
        """Batches this worker has left."""
        return len(self._sizes()) - self.taken

    def __iter__(self) -> Iterator[list[int]]:
        """The batches left; call `take` after training on one."""
        left, begin = self.left(), 0
        for number, sizes in enumerate(self._sizes()):
            start = begin + sum(sizes[: self.rank])
            if number >= self.taken:
                yield left[start : start + sizes[self.rank]].tolist()
            begin += sum(sizes)

    @property
    def carried(self) -> list[int]:
        """Samples of the epoch before that come first in this one."""
        return list(self._carried)

    def current(self) -> list[int]:
        """The batch to train on next."""
        sizes = self._sizes()
        begin = sum(map(sum, sizes[: self.taken])) + sum(sizes[self.taken][: self.rank])
        batch: list[int] = self.left()[begin : begin + sizes[self.taken][self.rank]].tolist()
        return batch

    def take(self) -> None:
        """This worker has trained on the next batch."""
        self.taken += 1

    @property
    def weight(self) -> float:
        """How much this worker's next batch counts where batches are unequal: its part of the mean size."""
        sizes = self._sizes()[self.taken]
        return 1.0 if len(set(sizes)) == 1 else sizes[self.rank] * len(sizes) / sum(sizes)

    def left(self) -> Samples:
        """The samples of this epoch that were left when the present world began, in order."""
        if self._cached is None:
            generator = np.random.default_rng([self.seed, self.epoch])
            order = generator.permutation(self.num_samples) if self.shuffle else np.arange(self.num_samples)
            left = np.concatenate([np.array(self._carried, dtype=np.int64), order.astype(np.int64)])
            for step_size, done in self._past:
                left = _without(left, step_size, done)
            self._cached = left
        return self._cached

    def _step_size(self) -> int:
        return self.batch_size * (self.world_size if self.fixed == "worker" else 1)

    def _sizes(self) -> list[list[int]]:
        if self._dealt is None:
            self._dealt = deal(len(self.left()), self.world_size, self._step_size())
        return self._dealt

    # -- changes ----------------------------------------------------------------------------------------

    def account(self, done: Sequence[int]) -> None:
        """The world has ended after each of its workers has trained on so many batches."""
        self._past.append((self._step_size(), list(done)))
        self._cached, self._dealt, self.taken = None, None, 0

    def next_epoch(self) -> None:
        """All workers are through with this epoch."""
        used = sum(map(sum, self._sizes()))
        self._carried = self.left()[used:].tolist()
        self._past, self._cached, self._dealt, self.taken = [], None, None, 0
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """What all workers have in common, in their present world."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "carried": list(self._carried),
            "past": [[size, list(done)] for size, done in self._past],
            "world_size": self.world_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])
        self._carried = [int(each) for each in state["carried"]]
        self._past = [(int(size), [int(each) for each in done]) for size, done in state["past"]]
        self.world_size = int(state["world_size"])
        self._cached, self._dealt, self.taken = None, None, 0


def _without(left: Samples, step_size: int, done: Sequence[int]) -> Samples:
    """The samples that are left after each of a world's workers has done so many of its batches."""
    kept = np.ones(len(left), dtype=bool)
    begin = 0
    for number, sizes in enumerate(deal(len(left), len(done), step_size)):
        for rank, end in enumerate(accumulate(sizes)):
            if number < done[rank]:
                kept[begin + end - sizes[rank] : begin + end] = False
        begin += sum(sizes)
    return left[kept]
