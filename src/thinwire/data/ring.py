"""ShuffleRing: every worker holds its own samples, and before they are used they travel to other workers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.data.rows import Field, Rows
from thinwire.data.trips import Trips
from thinwire.errors import DataError, PeerDiffers, UsageError, check, check_one_of
from thinwire.wire.base import Wire, Work
from thinwire.wire.ranges import range_of

Remainder = Literal["drop", "uneven"]


class Beside(Protocol):
    """The ring's own way to the other workers, and a thread for it."""

    @property
    def wire(self) -> Wire: ...
    def start(self, coroutine: Coroutine[Any, Any, None], /) -> Work: ...


class Link(Protocol):
    """What the ring asks of the link that `attach` returns."""

    def beside(self, name: str, settle: Callable[[], None]) -> Beside: ...
    def wait_for(self, works: Iterable[Work]) -> None: ...
    def gather_texts(self, text: str) -> list[str]: ...


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
        self._rows = Rows(fields)
        self._link = link
        self._agree("; ".join([f"seed {seed}, remainder {remainder}", *self._rows.describe()]))
        counts = [int(count) for count in link.gather_texts(str(len(self._rows)))]
        self.num_samples = sum(counts)
        """Samples of all workers together."""
        beside = link.beside("shuffle", self.settle)
        self._trips = Trips(
            self._rows,
            counts,
            seed=seed,
            uneven=remainder == "uneven",
            wire=beside.wire,
            start=beside.start,
        )
        self._resumed = False

    @property
    def epoch(self) -> int:
        """The epoch that `batches` goes through; see `set_epoch`."""
        return self._trips.epoch

    def __len__(self) -> int:
        """Samples this worker has left in this epoch."""
        return len(self._trips)

    # -- going through an epoch ---------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch`; if it is the one under way, go on with it. Called by all workers."""
        check(epoch >= 0, "epoch", "0 or more", epoch)
        if epoch != self.epoch:
            self.settle()
            self._trips.begin(epoch)
            self._resumed = False

    def batches(self, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """What is left of this epoch, as places in the fields, `batch_size` at a time (the last may be less).

        The samples are in their places when the batch is handed out, and stay there until the next epoch.
        Called by all workers, with one batch size.
        """
        check(batch_size >= 1, "batch_size", "at least 1", batch_size)
        if not len(self) and not self._resumed:
            raise UsageError(f"epoch {self.epoch} is used up", hint="call set_epoch(epoch) before each epoch")
        self._agree(f"epoch {self.epoch} in batches of {batch_size}")
        while len(self):
            with range_of("shuffle"):
                self._link.wait_for(self._trips.fetching(batch_size))
            yield self._trips.hand_out(batch_size)
        self.settle()

    def num_batches(self, batch_size: int) -> int:
        """How many batches `batches` has left."""
        return -(-len(self) // batch_size)

    def take(self, batch: NDArray[np.int64]) -> tuple[Any, ...]:
        """These samples, field by field: a copy of the rows of a tensor, the very tensors of a list."""
        return self._rows.take(torch.from_numpy(batch))

    def settle(self) -> None:
        """Wait until everything under way has arrived in place. Called by all workers."""
        self._link.wait_for(self._trips.settling())

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
        return {**self._trips.state_dict(), "rows": self._rows.dump()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on from a saved place, with the samples that were held there."""
        count = Rows.num_dumped(saved["rows"])
        if count != len(self._rows):
            raise DataError(f"{count:,} samples were saved, this worker holds {len(self._rows):,}")
        self.settle()
        self._trips.load_state_dict(saved)
        self._resumed = True
        self._rows.load([saved["rows"]], torch.arange(count))

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on from what another number of workers have saved: the samples are dealt out anew, first those
        that this epoch has not used yet."""
        counts = [Rows.num_dumped(each["rows"]) for each in saved]
        if sum(counts) != self.num_samples:
            raise DataError(f"{sum(counts):,} samples were saved, these workers hold {self.num_samples:,}")
        self.settle()
        mine = self._trips.resize(saved, counts)
        self._resumed = True
        self._rows.load([each["rows"] for each in saved], torch.from_numpy(mine))
