"""Trips: how one worker's samples travel through an epoch. What moves in a ShuffleRing, and on the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.data.rows import Parcel, Rows
from thinwire.wire.base import Wire, Work, take_off

Start = Callable[[Coroutine[Any, Any, None]], Work]
"""Drives a coroutine beside training."""
AHEAD = 4
"""Batches that are on their way while one is trained on; who is as far ahead of a peer waits for it."""


class _Trip(NamedTuple):
    """Samples that leave their places, and others that arrive there."""

    start: int
    """Where they stand in this epoch's order."""
    work: Work


class Trips:
    """A worker goes through its samples in an order of its own, and before their turn most are replaced.

    One P-th of each batch (P workers) stays. The rest goes to the worker h places back in the ring, h being
    1, 2, ... P-1 in turn, and as many from the worker h places on take their places.
    """

    def __init__(
        self, rows: Rows, counts: Sequence[int], *, seed: int, uneven: bool, wire: Wire, start: Start
    ) -> None:
        """`counts`: how many samples each worker holds; `uneven`: whether what one holds more is used."""
        self.seed = seed
        self._rows = rows
        self._counts = counts
        self._uneven = uneven
        self._wire = wire
        self._start = start
        self._under_way: deque[_Trip] = deque()
        self._sent = 0
        """Messages so far; which worker is next follows from it."""
        self._cut = 0
        """Samples so far that were cut into those that stay and those that travel."""
        self.begin(0)

    def __len__(self) -> int:
        """Samples left in this epoch."""
        return (len(self._order) if self._uneven else self._common) - self._position

    def begin(self, epoch: int) -> None:
        """Start an epoch; nothing may be under way."""
        self.epoch = epoch
        generator = np.random.default_rng([self.seed, epoch, self._wire.rank])
        self._go_to(generator.permutation(len(self._rows)), common=min(self._counts))

    def _go_to(self, order: NDArray[np.int64], *, common: int, position: int = 0, departed: int = 0) -> None:
        assert not self._under_way
        self._order = order
        """This epoch's, as places among the rows."""
        self._common = common
        """How far every worker's order goes; what is beyond that does not travel."""
        self._position = position
        """Samples of the order that were handed out,"""
        self._departed = departed
        """and those that were sent on their way, if they are not to stay."""

    # -- batch after batch --------------------------------------------------------------------------

    def fetching(self, batch_size: int) -> Iterator[Work]:
        """Send samples of later batches on their way, and wait for those of the next one."""
        while self._departed < min(self._common, self._position + (1 + AHEAD) * batch_size):
            self._depart(min(batch_size, self._common - self._departed))
        end = self._position + min(batch_size, len(self))
        while self._under_way and self._under_way[0].start < end:
            yield from self._landing()

    def hand_out(self, batch_size: int) -> NDArray[np.int64]:
        """The places of the next batch, which has been fetched."""
        begin, self._position = self._position, self._position + min(batch_size, len(self))
        return self._order[begin : self._position]

    def settling(self) -> Iterator[Work]:
        """Wait until everything under way has arrived in place."""
        while self._under_way:
            yield from self._landing()

    def _landing(self) -> Iterator[Work]:
        yield self._under_way[0].work
        self._under_way.popleft()

    def _depart(self, count: int) -> None:
        """Start the next samples on their way, and what takes their places."""
        rank, world_size = self._wire.rank, self._wire.world_size
        start, before = self._departed, self._cut
        self._departed, self._cut = start + count, before + count
        num_staying = self._cut // world_size - before // world_size
        if num_staying == count:
            return
        slots = torch.from_numpy(self._order[start : start + count - num_staying])
        places = 1 + self._sent % (world_size - 1)
        travel = self._travel(slots, self._sent, (rank - places) % world_size, (rank + places) % world_size)
        self._sent += 1
        self._under_way.append(_Trip(start, self._start(travel)))

    async def _travel(self, slots: Tensor, number: int, to: int, source: int) -> None:
        await take_off()  # nobody needs these places now, so all of it can happen beside training
        tag, wire = 2 * number % 1024, self._wire
        outbox, inbox = self._rows.pack(slots), Parcel(self._rows.empty_head(len(slots)))
        await wire.exchange(send=outbox.head, to=to, recv=inbox.head, source=source, tag=tag)
        if outbox.tail is not None:
            inbox.tail = self._rows.empty_tail(inbox.head)
            await wire.exchange(
                send=outbox.tail if len(outbox.tail) else None,
                to=to,
                recv=inbox.tail if len(inbox.tail) else None,
                source=source,
                tag=tag + 1,
            )
        self._rows.put(slots, self._rows.unpack(inbox))

    # -- saved and loaded; nothing may be under way -------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This worker's place in the epoch."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "order": torch.from_numpy(self._order.copy()),
            "common": self._common,
            "position": self._position,
            "departed": self._departed,
            "sent": self._sent,
            "cut": self._cut,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a saved place."""
        self._restore(saved)
        places = {name: saved[name] for name in ("common", "position", "departed")}
        self._go_to(saved["order"].numpy().copy(), **places)

    def resize(self, saved: Sequence[dict[str, Any]], counts: Sequence[int]) -> NDArray[np.int64]:
        """Go on with what other workers, who held `counts` samples, have left of their epoch.

        Returns which samples this worker holds from now on, numbered through all of theirs.
        """
        starts = np.cumsum([0, *counts[:-1]])
        lefts = [each["order"].numpy()[each["position"] :] for each in saved]
        left = np.concatenate([start + each for start, each in zip(starts, lefts, strict=True)])
        samples = np.concatenate([left, np.setdiff1d(np.arange(sum(counts)), left)])
        holders = deal(self._counts)
        mine = np.flatnonzero(holders == self._wire.rank)
        common = np.bincount(holders[: len(left)], minlength=len(self._counts)).min()
        self._restore(saved[0])
        self._go_to(np.arange(np.sum(mine < len(left))), common=int(common))
        return samples[mine]

    def _restore(self, saved: dict[str, Any]) -> None:
        self.seed, self.epoch = saved["seed"], saved["epoch"]
        self._sent, self._cut = saved["sent"], saved["cut"]


def deal(counts: Sequence[int]) -> NDArray[np.int64]:
    """Who gets each of `sum(counts)` cards dealt in turn, when worker i stops taking after `counts[i]`.

    >>> deal([1, 3, 2]).tolist()
    [0, 1, 2, 1, 2, 1]
    """
    ranks = np.repeat(np.arange(len(counts)), counts)
    rounds = np.concatenate([np.arange(count) for count in counts])
    return ranks[np.lexsort((ranks, rounds))]
