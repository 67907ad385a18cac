"""The state of GossipGraD: its saved part, and the part that only lives while a round does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.compress.payload import Payload
from thinwire.strategies.base import SAME, Bucket, Values
from thinwire.strategies.gossip.agreement import Agreement, RoundTimer
from thinwire.strategies.gossip.chunks import Chunks, Window, WindowPosition
from thinwire.strategies.gossip.encoding import RoundingMemory
from thinwire.topology import Peers, Schedule
from thinwire.wire.work import Work

SAMPLE_EVERY = 16
"""Rounds between two measurements of how far the peers are apart."""


@dataclass(slots=True)
class GossipRound:
    """One round: which chunks go to whom."""

    window: Window
    peers: Peers
    payload: Payload
    left: int
    """Buckets in use that have not come back."""
    sampled: bool
    late: bool = False
    apart: float = 0.0
    """Squared distance to the peer, of the buckets that have come back."""
    norm: float = 0.0


@dataclass(slots=True)
class GossipRuntime:
    """What `init` finds out once, and is not saved."""

    schedule: Schedule
    chunks: Chunks
    momenta: int
    """Optimizer averages that travel along with every parameter."""
    timer: RoundTimer = field(default_factory=RoundTimer)
    agreement: Agreement | None = None


@dataclass(slots=True)
class GossipState:
    """One worker's state."""

    memory: RoundingMemory
    payload: Payload = field(metadata=SAME)
    num_chunks: int = field(metadata=SAME)
    """Sent in a round."""
    position: WindowPosition = field(default_factory=WindowPosition, metadata=SAME)
    caution: float = field(default=1.0, metadata=SAME)
    """Part of the estimated budget that is used; less after a round did not fit."""
    late_rounds: int = 0
    distance: float = field(default=0.0, metadata=SAME)
    """From the mean of all workers, relative to the model's size, as estimated from the last peers met."""
    runtime: GossipRuntime = field(init=False, repr=False)
    round: GossipRound | None = field(init=False, repr=False, default=None)
    ready: Work = field(init=False, repr=False, default_factory=Work)
    """Ends when `round` is that of the step being mixed."""

    @property
    def share(self) -> float:
        """Part of the model that a round sends."""
        return self.num_chunks / len(self.runtime.chunks)

    def values(self, bucket: Bucket) -> list[Values]:
        """A bucket's numbers that travel."""
        return [bucket, *bucket.optimizer_state.values()] if self.runtime.momenta else [bucket]

    def next_round(self, rank: int, step: int) -> GossipRound:
        """Move the window on and look up the peers."""
        window = self.runtime.chunks.window(self.position, self.num_chunks)
        peers = self.runtime.schedule.peers(rank, window.number)
        return GossipRound(window, peers, self.payload, len(window.spans), sampled=step % SAMPLE_EVERY == 1)

    def sample(self, round: GossipRound, changes: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Measure how far a bucket's parameters are from the peer's."""
        if round.sampled and not sent[0].is_meta:
            round.apart += sum(float(each.square().sum()) for each in changes)
            round.norm += sum(float(each.square().sum()) for each in sent)

    def came_back(self, round: GossipRound, waited_s: float) -> bool:
        """A bucket is back; gives whether it was the last one of its round."""
        round.late = round.late or waited_s > 0
        round.left -= 1
        if round.left > 0:
            return False
        self.late_rounds += round.late
        if round.norm > 0:
            self.distance = distance_from_mean(round.apart, round.norm, self.runtime.schedule.world_size)
        return True


def distance_from_mean(apart: float, norm: float, world_size: int) -> float:
    """Two of P workers are sqrt(2 P / (P - 1)) times as far from each other as each is from the mean."""
    return float((apart / norm * (world_size - 1) / (2 * world_size)) ** 0.5)
