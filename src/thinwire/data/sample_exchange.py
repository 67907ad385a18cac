"""How one worker's samples travel through an epoch, in a ShuffleRing or on the virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.data.sample_table import SampleTable
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, in_background

Start = Callable[[Callable[[Wire], Coroutine[Any, Any, None]]], Work]
"""Runs a coroutine beside training, with a wire of its own."""
AHEAD = 4
"""Batches in transfer while one is trained on; a worker that is this far ahead of a peer waits for it."""


class SampleExchange:
    """A worker goes through its samples in an order of its own, and before their turn most are replaced.

    One P-th of each batch (P workers) stays. The rest is sent to the worker h places back in the ring, h
    being 1, 2, ... P-1 in turn, and as many from the worker h places ahead take their places.
    """

    def __init__(
        self, table: SampleTable, counts: Sequence[int], *, seed: int, uneven: bool, rank: int, start: Start
    ) -> None:
        """`counts`: samples each worker holds; `uneven`: whether those beyond the smallest count are used."""
        self.seed = seed
        self._table, self._counts, self._uneven = table, counts, uneven
        self._rank, self._start = rank, start
        self._in_transfer: deque[tuple[int, Work]] = deque()
        """Transfers by their start in this epoch's order."""
        self._num_sent = 0
        """Messages so far; the next peer follows from it."""
        self._num_split = 0
        """Samples so far that were split into those that stay and those that travel."""
        self.begin(0)

    def __len__(self) -> int:
        """Samples left in this epoch."""
        return (len(self._order) if self._uneven else self._common) - self._position

    def begin(self, epoch: int) -> None:
        """Start an epoch; nothing may be in transfer."""
        self.epoch = epoch
        generator = np.random.default_rng([self.seed, epoch, self._rank])
        self._go_to(generator.permutation(len(self._table)), common=min(self._counts))

    def _go_to(self, order: NDArray[np.int64], *, common: int, position: int = 0, departed: int = 0) -> None:
        assert not self._in_transfer
        self._order = order
        """This epoch's order, as rows of the table."""
        self._common = common
        """Length that every worker's order has; samples beyond it do not travel."""
        self._position = position
        """Samples of the order that were handed out."""
        self._departed = departed
        """Samples of the order whose transfer has been started, or that stay."""

    # -- batch after batch --------------------------------------------------------------------------

    def fetching(self, batch_size: int) -> Iterator[Work]:
        """Start the transfer of later batches, and wait for the next one."""
        # the same on every worker: `_departed`, `_common` and `batch_size` are, so transfers pair up
        while self._departed < min(self._common, self._position + (1 + AHEAD) * batch_size):
            self._depart(min(batch_size, self._common - self._departed))
        yield from self._arriving(self._position + min(batch_size, len(self)))

    def hand_out(self, batch_size: int) -> NDArray[np.int64]:
        """Return the rows of the next batch, which has been fetched."""
        begin, self._position = self._position, self._position + min(batch_size, len(self))
        return self._order[begin : self._position]

    def settling(self) -> Iterator[Work]:
        """Wait until everything in transfer has arrived."""
        yield from self._arriving(len(self._order))

    def _arriving(self, end: int) -> Iterator[Work]:
        """Wait for the transfers that start before `end` in this epoch's order."""
        while self._in_transfer and self._in_transfer[0][0] < end:
            yield self._in_transfer[0][1]
            self._in_transfer.popleft()

    def _depart(self, count: int) -> None:
        """Start the transfer of the next samples, and of those that take their places."""
        world_size, start, before = len(self._counts), self._departed, self._num_split
        self._departed, self._num_split = start + count, before + count
        # by running totals, so that exactly one P-th stays, whatever the batch size
        num_staying = self._num_split // world_size - before // world_size
        if num_staying == count:
            return
        slots = torch.from_numpy(self._order[start : start + count - num_staying])
        hop, tag = 1 + self._num_sent % (world_size - 1), 2 * self._num_sent % 1024
        self._num_sent += 1
        to, source = (self._rank - hop) % world_size, (self._rank + hop) % world_size
        work = self._start(lambda wire: self._transfer(slots, tag, to, source, wire))
        self._in_transfer.append((start, work))

    async def _transfer(self, slots: Tensor, tag: int, to: int, source: int, wire: Wire) -> None:
        await in_background()  # nobody needs these rows now
        table = self._table
        head, tail = table.encode(slots)
        new_head, new_tail = table.empty_head(len(slots)), tail
        await wire.exchange(send=head, to=to, recv=new_head, source=source, tag=tag)
        if table.has_lists:
            new_tail = table.empty_tail(new_head)
            send, recv = (part if len(part) else None for part in (tail, new_tail))
            await wire.exchange(send=send, to=to, recv=recv, source=source, tag=tag + 1)
        table.put(slots, table.decode(new_head, new_tail))

    # -- saved and loaded; nothing may be in transfer -----------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's place in the epoch."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "order": torch.from_numpy(self._order.copy()),
            "common": self._common,
            "position": self._position,
            "departed": self._departed,
            "sent": self._num_sent,
            "cut": self._num_split,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved place."""
        places = {name: saved[name] for name in ("common", "position", "departed")}
        self._restore(saved, saved["order"].numpy().copy(), **places)

    def resize(self, saved: Sequence[dict[str, Any]], counts: Sequence[int]) -> NDArray[np.int64]:
        """Continue with the samples that other workers, who held `counts`, have left of their epoch.

        Returns which samples this worker holds from now on, numbered through all of theirs.
        """
        starts = np.cumsum([0, *counts[:-1]])
        lefts = [each["order"].numpy()[each["position"] :] for each in saved]
        left = np.concatenate([start + each for start, each in zip(starts, lefts, strict=True)])
        samples = np.concatenate([left, np.setdiff1d(np.arange(sum(counts)), left)])
        holders = deal(self._counts)
        mine = np.flatnonzero(holders == self._rank)
        common = np.bincount(holders[: len(left)], minlength=len(self._counts)).min()
        self._restore(saved[0], np.arange(np.sum(mine < len(left))), common=int(common))
        return samples[mine]

    def _restore(self, saved: dict[str, Any], order: NDArray[np.int64], **places: int) -> None:
        self.seed, self.epoch = saved["seed"], saved["epoch"]
        self._num_sent, self._num_split = saved["sent"], saved["cut"]
        self._go_to(order, **places)


def deal(counts: Sequence[int]) -> NDArray[np.int64]:
    """Return who gets each of `sum(counts)` samples dealt in turn, when worker i stops after `counts[i]`.

    >>> deal([1, 3, 2]).tolist()
    [0, 1, 2, 1, 2, 1]
    """
    ranks = np.repeat(np.arange(len(counts)), counts)
    rounds = np.concatenate([np.arange(count) for count in counts])
    return ranks[np.lexsort((ranks, rounds))]
