"""A lane: one ordered channel between workers, as backends implement it; a `Wire` is on top of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from thinwire.errors import PeerError, PeerLate
from thinwire.traffic import Op
from thinwire.wire.work import Work

if TYPE_CHECKING:
    from torch import Tensor

Buffer: TypeAlias = "Tensor | None"
"""What one half of an exchange sends or receives; None: that half is absent."""
Peer: TypeAlias = int | None
WAITING, DETACHING, LEFT = "waiting", "detaching", "left"
IN_CALL, FAILING = "in ", "failing with "
"""How `Status.doing` begins; the name of the call, or the error, comes after it."""


class Status(NamedTuple):
    """Where a worker is in its program, for others who wait for it. All workers run the same program."""

    steps: int = 0
    """Optimizer steps done."""
    passes: int = 0
    """Backward passes that send, and steps, begun since the last step was done."""
    calls: int = 0
    """Methods of the link that all workers call, begun so far."""
    doing: str = ""
    """WAITING for others, IN_CALL of such a method, FAILING, DETACHING or LEFT; empty while on its own."""

    def __str__(self) -> str:
        return f"step {self.steps}, {self.doing}" if self.doing else f"step {self.steps}"

    @property
    def leaves(self) -> bool:
        """Whether it makes no step any more."""
        return self.doing == DETACHING or self.doing.startswith(FAILING)

    def is_beyond(self, other: Status) -> bool:
        """Whether this worker waits at a later point of the program than the other one, which is in a call
        that this one has left out: so neither can go on."""
        left_out = other.doing.startswith(IN_CALL) and other.calls > self.calls
        return left_out and self.doing == WAITING and self[:2] > other[:2]


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

    @property
    def listens_to(self) -> Sequence[Peer]:
        """Whose messages a listener has a receive open for: each other worker's, or None, whoever comes."""

    def collective(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        """Do what `Wire` has a method for; `out` is `data` itself where `op` works in place."""

    def exchange(
        self, *, send: Buffer = None, to: Peer = None, recv: Buffer = None, source: Peer = None, tag: int = 0
    ) -> Work:
        """Send to one peer and receive from one, at the same time.

        To receive without a `source` is to receive from whoever sends with this tag first, on lanes whose
        `listens_to` has None.
        """

    def lane(self, name: str, ranks: Sequence[int] | None = None) -> Lane:
        """Another channel, for all workers or for `ranks`; returns at once, and connects when first used.

        The same name and ranks mean the same channel on every worker, whoever asks first.
        """

    def now(self) -> float:
        """Seconds on the clock that this lane's works end by; only differences mean something."""

    def sleep(self, seconds: float) -> Work:
        """A work that ends after so many seconds of that clock."""

    def set_status(self, status: Status) -> None:
        """What this worker is doing, for peers that wait for it."""

    @property
    def lost(self) -> BaseException | None:
        """Why nothing can be sent any more, once a worker is gone."""

    def missing(self, awaited_step: int = 0) -> PeerError | None:
        """The error for waiting where a worker will never come to; this one waits for the mixing after
        `awaited_step`."""

    def late_error(self, cause: str) -> PeerLate:
        """The error for having waited too long, naming the worker that is furthest behind."""

    def abort(self, error: PeerError) -> BaseException:
        """End everything under way with `error`, on all lanes and all workers; nothing starts after it. Gives
        the cause that counts, which is another one if training has ended before."""

    def close(self) -> None:
        """Give back threads and connections; nothing may be under way."""
