"""ShuffleRing: every worker holds its own samples, and before they are used they travel to other workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.data.rows import Field, Parcel, Rows
from thinwire.errors import DataError, PeerDiffers, UsageError, check, check_one_of
from thinwire.wire.base import Wire, Work, take_off
from thinwire.wire.ranges import range_of

Remainder = Literal["drop", "uneven"]
AHEAD = 4
"""Batches that are on their way while one is trained on; who is as far ahead of a peer waits for it."""


class Beside(Protocol):
    """The ring's own way to the other workers, and a thread for it."""

    @property
    def wire(self) -> Wire: ...
    def start(self, coroutine: Coroutine[Any, Any, None], /) -> Work: ...
    def wait(self, work: Work, /) -> None: ...


class Link(Protocol):
    """What the ring asks of the link that `attach` returns."""

    rank: int
    world_size: int

    def beside(self, name: str, settle: Callable[[], None]) -> Beside: ...
    def gather_texts(self, text: str) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class _Trip:
    """Samples that leave their places, and others that arrive there."""

    start: int
    """Where they stand in this epoch's order."""
    work: Work


class ShuffleRing:
    """The samples of a world, each held by one worker, wandering from worker to worker as they are used.

    Every worker goes through its samples in an order of its own. A few batches before their turn, while
    training goes on, one P-th of a batch (P workers) stays and the rest travels to the worker h places back
    in the ring, h being 1, 2, ... P-1 in turn; what comes in return takes the same places. So each worker
    sends one message per batch, of less than a batch, and its batches, as well as what it holds after an
    epoch, are from everybody, however the samples lay at first.

    Guaranteed: no sample is lost or doubled, and each is used once in an epoch (but see `remainder`).

    >>> import torch, thinwire as tw
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> inputs, labels = torch.randn(10, 2), torch.randn(10, 1)      # of this worker alone
    >>> with tw.attach(model, optimizer, tw.AllReduce()) as link:
    ...     ring = tw.data.ShuffleRing(inputs, labels, link=link)
    ...     for epoch in range(2):
    ...         ring.set_epoch(epoch)
    ...         for batch in ring.batches(4):
    ...             x, y = ring.take(batch)                          # or inputs[batch], labels[batch]
    ...             (model(x) - y).square().mean().backward()
    ...             optimizer.step()
    >>> link.stats.steps
    6

    Reference: Daily et al., GossipGraD, 2018, arXiv:1803.05880. Their code sends a batch after its use, all
    of it and with h = 1, so that whole shards move on together and never mix.
    """

    def __init__(self, *fields: Field, link: Link, seed: int = 0, remainder: Remainder = "drop") -> None:
        """Take over this worker's samples. Called by all workers, at the same point.

        Args:
            fields: tensors with one row per sample, or lists with one tensor per sample, of any length.
                They are overwritten in place by the samples that arrive.
            link: what `attach` returned.
            seed: of the orders; the same on all workers.
            remainder: what becomes of the samples that a worker holds more than another. "drop": they sit
                this epoch out (others do in the next), and all workers have equally many batches.
                "uneven": they are used, and stay where they are this epoch; use `link.join()`.
        """
        check_one_of("remainder", remainder, ("drop", "uneven"))
        check(seed >= 0, "seed", "0 or more", seed)
        self.seed = seed
        self.remainder = remainder
        self.epoch = 0
        """The epoch that `batches` goes through; see `set_epoch`."""
        self._rows = Rows(fields)
        self._link = link
        self._counts = self._meet()
        self._beside = link.beside("shuffle", self.settle)
        self._trips: deque[_Trip] = deque()
        self._resumed = False
        self._agreed = 0
        """The batch size that all workers are known to use."""
        self._sent = 0
        """Messages so far; which worker is next follows from it."""
        self._cut = 0
        """Samples so far that were cut into those that stay and those that travel."""
        self._begin()

    @property
    def num_samples(self) -> int:
        """Samples of all workers together."""
        return sum(self._counts)

    def __len__(self) -> int:
        """Samples this worker has left in this epoch."""
        return (self._common if self.remainder == "drop" else len(self._order)) - self._position

    # -- going through an epoch ---------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch`; if it is the one under way, go on with it. Called by all workers."""
        check(epoch >= 0, "epoch", "0 or more", epoch)
        if epoch != self.epoch:
            self.settle()
            self.epoch, self._resumed = epoch, False
            self._begin()

    def batches(self, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """What is left of this epoch, as places in the fields, `batch_size` at a time (the last may be less).

        The samples are in their places when the batch is handed out, and stay there until the next epoch.
        Called by all workers, with one batch size.
        """
        check(batch_size >= 1, "batch_size", "at least 1", batch_size)
        if not len(self) and not self._resumed:
            raise UsageError(f"epoch {self.epoch} is used up", hint="call set_epoch(epoch) before each epoch")
        if batch_size != self._agreed:
            self._agree(f"epoch {self.epoch} in batches of {batch_size}")
            self._agreed = batch_size
        while len(self):
            with range_of("shuffle"):
                batch = self._next(batch_size)
            yield batch
        self.settle()

    def num_batches(self, batch_size: int) -> int:
        """How many batches `batches` has left."""
        return -(-len(self) // batch_size)

    def take(self, batch: NDArray[np.int64]) -> tuple[Any, ...]:
        """These samples, field by field: a copy of the rows of a tensor, the very tensors of a list."""
        return self._rows.take(torch.from_numpy(batch))

    def settle(self) -> None:
        """Wait until everything under way has arrived in place. Called by all workers."""
        while self._trips:
            self._land()

    def _begin(self) -> None:
        generator = np.random.default_rng([self.seed, self.epoch, self._link.rank])
        self._go_to(generator.permutation(len(self._rows)), common=min(self._counts))

    def _go_to(self, order: NDArray[np.int64], *, common: int, position: int = 0, departed: int = 0) -> None:
        self._order = order
        """This epoch's, as places in the fields."""
        self._common = common
        """How far every worker's order goes; what is beyond that does not travel."""
        self._position = position
        """Samples of the order that were handed out,"""
        self._departed = departed
        """and those that were sent on their way, if they are not to stay."""

    def _next(self, batch_size: int) -> NDArray[np.int64]:
        while self._departed < min(self._common, self._position + (1 + AHEAD) * batch_size):
            self._depart(min(batch_size, self._common - self._departed))
        end = self._position + min(batch_size, len(self))
        while self._trips and self._trips[0].start < end:
            self._land()
        batch, self._position = self._order[self._position : end], end
        return batch

    # -- on the wire --------------------------------------------------------------------------------

    def _depart(self, count: int) -> None:
        """Start the next samples on their way, and what takes their places."""
        rank, world_size = self._link.rank, self._link.world_size
        start, before = self._departed, self._cut
        self._departed, self._cut = start + count, before + count
        num_staying = self._cut // world_size - before // world_size
        if num_staying == count:
            return
        slots = torch.from_numpy(self._order[start : start + count - num_staying])
        places = 1 + self._sent % (world_size - 1)
        travel = self._travel(slots, self._sent, (rank - places) % world_size, (rank + places) % world_size)
        self._sent += 1
        self._trips.append(_Trip(start, self._beside.start(travel)))

    async def _travel(self, slots: Tensor, number: int, to: int, source: int) -> None:
        await take_off()  # nobody needs these places now, so all of it can happen beside training
        tag, wire = 2 * number % 1024, self._beside.wire
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

    def _land(self) -> None:
        """Wait until what departed first has been replaced."""
        self._beside.wait(self._trips[0].work)
        self._trips.popleft()

    def _meet(self) -> list[int]:
        """Check that all workers hold samples of one kind; how many each holds."""
        self._agree("; ".join([f"seed {self.seed}, remainder {self.remainder}", *self._rows.describe()]))
        return [int(count) for count in self._link.gather_texts(str(len(self._rows)))]

    def _agree(self, text: str) -> None:
        for rank, other in enumerate(texts := self._link.gather_texts(text)):
            if other != texts[0]:
                raise PeerDiffers(
                    f"the shuffle ring differs: rank 0 has '{texts[0]}' where rank {rank} has '{other}'",
                    rank=rank,
                    hint="make and use the ring alike on every worker; only the number of samples may differ",
                )

    # -- saved and loaded ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This worker's samples and its place in the epoch; what is under way arrives first."""
        self.settle()
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "order": torch.from_numpy(self._order.copy()),
            "common": self._common,
            "position": self._position,
            "departed": self._departed,
            "sent": self._sent,
            "cut": self._cut,
            "rows": self._rows.dump(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a saved place, with the samples that were held there."""
        count = Rows.num_dumped(saved["rows"])
        if count != len(self._rows):
            raise DataError(f"{count:,} samples were saved, this worker holds {len(self._rows):,}")
        self._restore(saved)
        places = {name: saved[name] for name in ("common", "position", "departed")}
        self._go_to(saved["order"].numpy().copy(), **places)
        self._rows.load([saved["rows"]], torch.arange(count))

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on from what another number of workers have saved: the samples are dealt out anew, first those
        that this epoch has not used yet."""
        counts = [Rows.num_dumped(each["rows"]) for each in saved]
        if sum(counts) != self.num_samples:
            raise DataError(f"{sum(counts):,} samples were saved, these workers hold {self.num_samples:,}")
        starts = np.cumsum([0, *counts[:-1]])
        lefts = [each["order"].numpy()[each["position"] :] for each in saved]
        left = np.concatenate([start + each for start, each in zip(starts, lefts, strict=True)])
        samples = np.concatenate([left, np.setdiff1d(np.arange(sum(counts)), left)])
        holders = deal(self._counts)
        mine = np.flatnonzero(holders == self._link.rank)
        common = np.bincount(holders[: len(left)], minlength=len(self._counts)).min()
        self._restore(saved[0])
        self._go_to(np.arange(np.sum(mine < len(left))), common=int(common))
        self._rows.load([each["rows"] for each in saved], torch.from_numpy(samples[mine]))

    def _restore(self, saved: dict[str, Any]) -> None:
        self.settle()
        self.seed, self.epoch, self._resumed = saved["seed"], saved["epoch"], True
        self._sent, self._cut = saved["sent"], saved["cut"]


def deal(counts: Sequence[int]) -> NDArray[np.int64]:
    """Who gets each of `sum(counts)` cards dealt in turn, when worker i stops taking after `counts[i]`.

    >>> deal([1, 3, 2]).tolist()
    [0, 1, 2, 1, 2, 1]
    """
    ranks = np.repeat(np.arange(len(counts)), counts)
    rounds = np.concatenate([np.arange(count) for count in counts])
    return ranks[np.lexsort((ranks, rounds))]
