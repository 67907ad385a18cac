"""What moves in GossipGraD: what is saved, and what only lives while a round does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from thinwire.compress.sizes import Payload
from thinwire.strategies.base import Parameters
from thinwire.strategies.gossip.auto import Gauge, Meetings
from thinwire.strategies.gossip.cells import Cells, Place, Window
from thinwire.strategies.gossip.letter import Memory
from thinwire.topology import Peers, Schedule
from thinwire.wire.base import Wire, Work

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.strategies.gossip.mail import Mail

SAMPLE_EVERY = 16
"""Rounds between two looks at how far the peers are apart."""


@dataclass(slots=True)
class Turn:
    """One round: what goes where."""

    window: Window
    peers: Peers
    payload: Payload
    left: int
    """Buckets in use that have not landed."""
    sampled: bool
    late: bool = False
    apart: float = 0.0
    """Squared distance to the peer, as far as it has come in."""
    norm: float = 0.0


@dataclass(slots=True)
class Settled:
    """What `init` finds out once, and is not saved."""

    schedule: Schedule
    cells: Cells
    momenta: int
    """Numbers that travel along with every parameter, of those the optimizer keeps."""
    lane: Wire
    """For collectives: averages, meetings, counts."""
    gauge: Gauge = field(default_factory=Gauge)
    meetings: Meetings | None = None
    mail: Mail | None = None


@dataclass(slots=True)
class GossipState:
    """Plain tensors and numbers; the fields at the end live only while a worker does."""

    memory: Memory
    payload: Payload
    num_cells: int
    """Sent in a round."""
    place: Place = field(default_factory=Place)
    steps: int = 0
    masses: list[float] = field(default_factory=list)
    """Push-sum's weight of every cell; empty where it is always 1."""
    caution: float = 1.0
    """Part of what seems to fit that is used; less after it did not fit."""
    late_rounds: int = 0
    skipped_rounds: int = 0
    distance: float = 0.0
    """From the mean of all workers, relative to the model's size, as estimated from the last peers met."""
    fixed: Settled = field(init=False, repr=False)
    turn: Turn | None = field(init=False, repr=False, default=None)
    ready: Work = field(init=False, repr=False, default_factory=Work)
    """Ends when `turn` is that of the round being launched."""

    @property
    def share(self) -> float:
        """Of the model that a round sends."""
        return self.num_cells / len(self.fixed.cells)

    def values(self, bucket: Parameters) -> list[Parameters]:
        """What travels of a bucket."""
        return [bucket, *bucket.companions.values()] if self.fixed.momenta else [bucket]

    def next_turn(self, rank: int) -> Turn:
        """Move the window on and look up whom to meet."""
        window = self.fixed.cells.window(self.place, self.num_cells)
        return Turn(
            window=window,
            peers=self.fixed.schedule.peers(rank, window.number),
            payload=self.payload,
            left=len(window.spans),
            sampled=self.steps % SAMPLE_EVERY == 1,
        )

    def sample(self, turn: Turn, changes: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Take in how far a bucket's parameters are from the peer's."""
        if turn.sampled and not sent[0].is_meta:
            turn.apart += sum(float(each.square().sum()) for each in changes)
            turn.norm += sum(float(each.square().sum()) for each in sent)

    def landed(self, turn: Turn, waited_s: float) -> bool:
        """A bucket is back; whether it was the last one of its round."""
        turn.late = turn.late or waited_s > 0
        turn.left -= 1
        if turn.left > 0:
            return False
        self.late_rounds += turn.late
        if turn.norm > 0:
            self.distance = self.from_mean(turn.apart, turn.norm)
        return True

    def from_mean(self, apart: float, norm: float) -> float:
        """Two of P workers are sqrt(2 P / (P - 1)) times as far from each other as each is from the mean."""
        world_size = self.fixed.schedule.world_size
        return float((apart / norm * (world_size - 1) / (2 * world_size)) ** 0.5)


def resized(saved: Sequence[Any], rank: int) -> Any:
    """The state of a worker among others than before.

    All go on from the mean of the models, so none of them has an error or more mass than another. They have
    done equally many steps, unless one was lost in between: then all go on from where the furthest is.
    """
    furthest = max(saved, key=lambda each: int(each["steps"]))
    counts = ("late_rounds", "skipped_rounds")
    memory = furthest["memory"]
    return {
        **furthest,
        "memory": {**memory, "errors": [each.new_zeros(each.shape) for each in memory["errors"]]},
        "masses": [1.0] * len(furthest["masses"]),
        **{name: saved[rank][name] if rank < len(saved) else 0 for name in counts},
    }
