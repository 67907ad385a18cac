"""What wires inside one process have in common: collectives as meetings, and no peer to keep alive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from thinwire.errors import PeerDiffers, PeerLate
from thinwire.wire.base import Work

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.traffic import Op


@dataclass(slots=True)
class Meeting:
    """One collective: who has come so far, and with what."""

    what: tuple[object, ...]
    came: dict[int, tuple[Tensor, Tensor, Work]] = field(default_factory=dict)

    def refusal(self, rank: int, what: tuple[object, ...]) -> PeerDiffers | None:
        """Why a worker that has come for `what` does not belong here; None if it does."""
        if self.what == what:
            return None
        return PeerDiffers(
            f"worker {rank} does {what} where another does {self.what}",
            rank=rank,
            hint="all workers must issue the same operations in the same order on a lane",
        )


class LocalWire(ABC):
    """One worker's end of a world inside one process."""

    def all_reduce_(self, data: Tensor) -> Work:
        return self._meet("all_reduce", data, data)

    def reduce_scatter(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("reduce_scatter", data, out)

    def all_gather(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("all_gather", data, out)

    def all_to_all(self, data: Tensor, out: Tensor) -> Work:
        return self._meet("all_to_all", data, out)

    def broadcast_(self, data: Tensor, *, source: int) -> Work:
        return self._meet("broadcast", data, data, source)

    def tell(self, status: str) -> None:  # noqa: B027  # nobody here asks who is alive
        pass

    def late(self, cause: str) -> PeerLate:
        return PeerLate(cause)

    def close(self) -> None:  # noqa: B027  # and there is nothing to close
        pass

    @abstractmethod
    def _meet(self, op: Op, data: Tensor, out: Tensor, source: int = 0) -> Work:
        """Come to the next collective of this lane."""
