"""ShuffleRing: every worker holds its own samples, and before they are used they travel to other workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.data.sample_exchange import SampleExchange
from thinwire.data.sample_table import Field, SampleTable
from thinwire.errors import DataError, PeerDiffers, UsageError, check, check_one_of
from thinwire.wire.ranges import range_of

if TYPE_CHECKING:
    from thinwire.engine.link import Link

Remainder = Literal["drop", "uneven"]


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
        self._agree("; ".join([f"seed {seed}, remainder {remainder}", *self._table.describe()]))
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

    # -- going through an epoch ---------------------------------------------------------------------

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

    # -- saved and loaded ---------------------------------------------------------------------------

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
