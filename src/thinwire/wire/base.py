"""A lane: one ordered channel between workers, as backends implement it. Strategies see a `Wire` on top of
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from thinwire.wire.work import Work

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.errors import PeerError, PeerLate


class Lane(Protocol):
    """An ordered channel between workers.

    Every worker issues the same collectives in the same order, and they end in that order; `Sequencer` sees
    to that. Exchanges are matched by peers and tag and are free of that order. A buffer under way is neither
    written to nor, if it is being received, read.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

    @property
    def places(self) -> Sequence[tuple[str, str]]:
        """Host and site of every worker, in order of rank."""
        ...

    def all_reduce_(self, data: Tensor) -> Work:
        """Sum `data` over all workers, in place."""
        ...

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        """Sum `data` over all workers; this worker's part of the sum ends in `out`."""
        ...

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        """Put every worker's `data` (of equal size) into `out`, in order of rank."""
        ...

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        """Send the i-th part of `data` to worker i; the part from worker i ends in part i of `out`."""
        ...

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        """Overwrite `data` with that of worker `source`."""
        ...

    def exchange(
        self,
        *,
        send: Tensor | None = None,
        to: int | None = None,
        recv: Tensor | None = None,
        source: int | None = None,
        tag: int = 0,
    ) -> Work:
        """Send to one peer and receive from one, at the same time; either half may be absent.

        To receive without a `source` is to receive from whoever sends with this tag first; on the CPU only.
        """
        ...

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> Lane:
        """Another channel, for all workers or for `ranks`; returns at once, and connects when first used.

        The same name and ranks mean the same channel on every worker, whoever asks first.
        """
        ...

    def now(self) -> float:
        """Seconds on the clock that this lane's works end by; only differences mean something."""
        ...

    def set_status(self, status: str) -> None:
        """What this worker is doing ("step 17"), for peers that wait for it and give up."""
        ...

    def late_error(self, cause: str) -> PeerLate:
        """The error for having waited too long, naming the worker that is furthest behind."""
        ...

    def abort(self, error: PeerError) -> None:
        """End everything under way with `error`, on all lanes and all workers; nothing starts after it."""
        ...

    def close(self) -> None:
        """Give back threads and connections; nothing may be under way."""
        ...
