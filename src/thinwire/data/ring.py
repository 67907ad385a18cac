"""ShuffleRing: every worker holds its own samples, and before they are used they travel to other workers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.data.sample_table import Field, SampleTable
from thinwire.errors import DataError, PeerDiffers, UsageError, check, check_one_of
from thinwire.wire.ranges import range_of
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, in_background

if TYPE_CHECKING:
    from thinwire.engine.link import Link

Remainder = Literal["drop", "uneven"]
Start = Callable[[Callable[[Wire], Coroutine[Any, Any, None]]], Work]
"""Runs a coroutine beside training, with a wire of its own."""
AHEAD = 4
"""Batches in transfer while one is trained on; a worker that is this far ahead of a peer waits for it."""


class ShuffleRing:
    """The samples of all workers, each held by one of them; they travel between workers as they are used.

    Every worker goes through its samples in an order of its own. A few batches before their turn, beside
    training, one P-th of a batch (P workers) stays and the rest is sent to the worker h places back in the
    ring, h being 1, 2, ... P-1 in turn; the samples that arrive take their places. So each worker sends one
    message per batch, of less than a batch, and its batches, as well as the samples it holds after an epoch,
    come from all workers, however they were distributed at first.

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
            link: returned by `attach`.
            seed: seeds the orders; the same on all workers.
            remainder: treatment of the samples that a worker holds more than another. "drop": they are left
                out of this epoch (others of the next), and all workers have equally many batches.
                "uneven": they are used, and stay where they are this epoch; use `link.join()`.
        """
        check_one_of("remainder", remainder, ("drop", "uneven"))
        check(seed >= 0, "seed", "0 or more", seed)
        self._table = SampleTable(fields)
        self._link = link
        self._agree("; ".join([f"seed {seed}, remainder {remainder}", *map(str, self._table.formats)]))
        counts = link.all_gather_object(len(self._table))
        self.num_samples = sum(counts)
        """Samples of all workers together."""
        (lane, start), uneven = link.side_lane("shuffle", self.finish), remainder == "uneven"
        self._exchange = SampleExchange(
            self._table, counts, seed=seed, uneven=uneven, rank=lane.rank, start=start
        )
        self._resumed = False

    @property
    def epoch(self) -> int:
        """The epoch that `batches` goes through; see `set_epoch`."""
        return self._exchange.epoch

    def __len__(self) -> int:
        """Samples this worker has left in this epoch."""
        return len(self._exchange)

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch`, or continue it if it is the current one. Called by all workers."""
        check(epoch >= 0, "epoch", "0 or more", epoch)
        if epoch != self.epoch:
            self.finish()
            self._exchange.begin(epoch)
            self._resumed = False

    def batches(self, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows left in this epoch, `batch_size` at a time (the last batch may be smaller).

        The samples have arrived when the batch is yielded, and stay there until the next epoch.
        Called by all workers, with one batch size.
        """
        check(batch_size >= 1, "batch_size", "at least 1", batch_size)
        # a run resumed at the end of an epoch asks for batches of it once more: none, but no error
        if not len(self) and not self._resumed:
            raise UsageError(f"epoch {self.epoch} is used up", hint="call set_epoch(epoch) before each epoch")
        self._agree(f"epoch {self.epoch} in batches of {batch_size}")
        while len(self):
            with range_of("shuffle"):
                self._link.wait_for(self._exchange.fetching(batch_size))
            yield self._exchange.hand_out(batch_size)
        self.finish()

    def num_batches(self, batch_size: int) -> int:
        """Return how many batches `batches` has left."""
        return -(-len(self) // batch_size)

    def take(self, batch: NDArray[np.int64]) -> tuple[Any, ...]:
        """Return these samples by field: a copy of the rows of a tensor, the very tensors of a list."""
        return self._table.take(torch.from_numpy(batch))

    def finish(self) -> None:
        """Wait until every transfer has arrived. Called by all workers."""
        self._link.wait_for(self._exchange.settling())

    def _agree(self, text: str) -> None:
        for rank, other in enumerate(texts := self._link.all_gather_object(text)):
            if other != texts[0]:
                raise PeerDiffers(
                    f"the shuffle ring differs: rank 0 has '{texts[0]}' where rank {rank} has '{other}'",
                    rank=rank,
                    hint="make and use the ring alike on every worker; only the number of samples may differ",
                )

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's samples and its place in the epoch, once every transfer has arrived."""
        self.finish()
        return {**self._exchange.state_dict(), "rows": self._table.dump()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a saved place, with the samples that were held there."""
        count = SampleTable.num_dumped(saved["rows"])
        if count != len(self._table):
            raise DataError(f"{count:,} samples were saved, this worker holds {len(self._table):,}")
        self.finish()
        self._exchange.load_state_dict(saved)
        self._resumed = True
        self._table.load([saved["rows"]], torch.arange(count))

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Continue from the states of another number of workers: the samples are dealt out anew, first those
        that this epoch has not used yet."""
        counts = [SampleTable.num_dumped(each["rows"]) for each in saved]
        if sum(counts) != self.num_samples:
            raise DataError(f"{sum(counts):,} samples were saved, these workers hold {self.num_samples:,}")
        self.finish()
        mine = self._exchange.resize(saved, counts)
        self._resumed = True
        self._table.load([each["rows"] for each in saved], torch.from_numpy(mine))


class SampleExchange:
    """How the samples of one worker travel, in a ShuffleRing or on the virtual clock; nothing here waits."""

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
        yield from self.settling(self._position + min(batch_size, len(self)))

    def hand_out(self, batch_size: int) -> NDArray[np.int64]:
        """Return the rows of the next batch, which has been fetched."""
        begin, self._position = self._position, self._position + min(batch_size, len(self))
        return self._order[begin : self._position]

    def settling(self, end: float = math.inf) -> Iterator[Work]:
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
