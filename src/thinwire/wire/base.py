"""A lane: one ordered channel between workers, as backends implement it; a `Wire` is on top of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from thinwire.errors import PeerError, PeerLate
from thinwire.traffic import Op
from thinwire.wire.work import Work

if TYPE_CHECKING:
    from torch import Tensor

Buffer: TypeAlias = "Tensor | None"
"""What one half of an exchange sends or receives; None: that half is absent."""
Peer: TypeAlias = int | None


class Lane(Protocol):
    """An ordered channel between workers.

    Every worker issues the same collectives in the same order, and they end in that order; `Sequencer` sees
    to that. Exchanges are matched by peers and tag and are free of that order. A buffer under way is neither
    written to nor, if it is being received, read.
    """

    rank: int
    world_size: int

    @property
    def places(self) -> Sequence[tuple[str, str]]:
        """Host and site of every worker, in order of rank."""

    def collective(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        """Do what `Wire` has a method for; `out` is `data` itself where `op` works in place."""

    def exchange(
        self, *, send: Buffer = None, to: Peer = None, recv: Buffer = None, source: Peer = None, tag: int = 0
    ) -> Work:
        """Send to one peer and receive from one, at the same time.

        To receive without a `source` is to receive from whoever sends with this tag first; on the CPU only.
        """

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> Lane:
        """Another channel, for all workers or for `ranks`; returns at once, and connects when first used.

        The same name and ranks mean the same channel on every worker, whoever asks first.
        """

    def now(self) -> float:
        """Seconds on the clock that this lane's works end by; only differences mean something."""

    def sleep(self, seconds: float) -> Work:
        """A work that ends after so many seconds of that clock."""

    def set_status(self, steps: int, doing: str) -> None:
        """Steps done and what this worker is doing, for peers that wait for it."""

    @property
    def lost(self) -> BaseException | None:
        """Why nothing can be sent any more, once a worker is gone."""

    def missing(self, steps: int) -> PeerError | None:
        """The error for waiting in the step after `steps` for a worker that will never come there."""

    def late_error(self, cause: str) -> PeerLate:
        """The error for having waited too long, naming the worker that is furthest behind."""

    def abort(self, error: PeerError) -> None:
        """End everything under way with `error`, on all lanes and all workers; nothing starts after it."""

    def close(self) -> None:
        """Give back threads and connections; nothing may be under way."""
