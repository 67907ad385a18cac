"""Who trains on which samples of an epoch while workers come and go, and the account of it; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Batch = NDArray[np.int64]
Hand = list[Batch]
"""A worker's batches of an epoch, in order."""
Cut = Callable[[NDArray[np.int64], int, int], list[Hand]]
"""Deals samples to so many workers in batches of so many."""


class Deal:
    """The batches of one epoch; a step that was given up puts its batch back."""

    def __init__(self, num_samples: int, hands: Sequence[Hand], batch_size: int, cut: Cut) -> None:
        self._hands = [list(hand) for hand in hands]
        self._drawn: list[Batch | None] = [None] * len(hands)
        self._batch_size, self._cut = batch_size, cut
        self._trained = np.zeros(num_samples, dtype=np.int64)
        self._given_back = 0
        self._rest = self._not_dealt(np.arange(num_samples))
        """What did not go around; if this is dealt again, it comes back."""

    def num_batches(self, rank: int) -> int:
        """That this worker has left."""
        return len(self._hands[rank])

    def give(self, rank: int, batch: Batch) -> None:
        """One more batch for this worker: other workers have sent it."""
        self._hands[rank].append(batch)

    def draw(self, rank: int) -> Batch | None:
        """This worker's next batch; None when it has none left."""
        self._drawn[rank] = self._hands[rank].pop(0) if self._hands[rank] else None
        return self._drawn[rank]

    def trained(self, rank: int) -> None:
        """A step was made with the batch drawn last."""
        batch, self._drawn[rank] = self._drawn[rank], None
        assert batch is not None
        self._trained[batch] += 1

    def again(self, num_workers: int) -> None:
        """Deal what is left to another number of workers."""
        drawn = [batch for batch in self._drawn if batch is not None]
        self._given_back += sum(len(batch) for batch in drawn)
        left = drawn + [batch for hand in self._hands for batch in hand]
        samples = np.concatenate([*left, self._rest])
        self._hands = self._cut(samples, num_workers, self._batch_size)
        self._rest = self._not_dealt(samples)
        self._drawn = [None] * num_workers

    def _not_dealt(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        dealt = [batch for hand in self._hands for batch in hand]
        return samples[~np.isin(samples, np.concatenate(dealt))] if dealt else samples

    def account(self) -> str:
        """What became of the samples so far; never trained on is also the rest that does not go around."""
        counts = self._trained
        once, more, never = ((counts == 1).sum(), (counts > 1).sum(), (counts == 0).sum())
        back = f", {self._given_back} dealt again after a loss" if self._given_back else ""
        return f"{len(counts)} samples: {once} trained once, {more} more often, {never} never{back}"


def in_turn(samples: NDArray[np.int64], num_workers: int, batch_size: int) -> list[Hand]:
    """Like cards, the rest that does not go around left out; batches are equally long for all.

    >>> [[batch.tolist() for batch in hand] for hand in in_turn(np.arange(7), 2, 2)]
    [[[0, 2], [4]], [[1, 3], [5]]]
    """
    each = len(samples) // num_workers
    dealt = samples[: each * num_workers].reshape(each, num_workers)
    return [[own[start : start + batch_size] for start in range(0, each, batch_size)] for own in dealt.T]


def in_streams(samples: NDArray[np.int64], num_workers: int, batch_size: int) -> list[Hand]:
    """Contiguous rows, `batch_size` of them to each worker; one sample of every row is a batch.

    >>> [[batch.tolist() for batch in hand] for hand in in_streams(np.arange(9), 2, 2)]
    [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    """
    rows = num_workers * batch_size
    length = len(samples) // rows
    table = np.sort(samples)[: length * rows].reshape(num_workers, batch_size, length)
    return [list(hand.T) for hand in table]
