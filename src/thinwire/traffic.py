"""Traffic, rounds, paths: bytes, messages and seconds as values, from sizes alone; no torch.

Collectives are counted the way the backends send them (ring all-reduce and all-gather, binomial
broadcast), for one worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Op = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "exchange"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one worker puts on and takes off the wire."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages: int = 0
    """Messages sent."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.messages + other.messages,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One wire operation of one worker: what it is and how large the buffers are."""

    op: Op
    send_bytes: int = 0
    """Size of the buffer handed in (for a broadcast: of the buffer broadcast)."""
    recv_bytes: int = 0
    """Size of the buffer an exchange receives into; collectives derive theirs."""
    source: int = 0
    """Rank a broadcast starts from."""
    ranks: tuple[int, int] | None = None
    """Only workers from the first up to the second of these ranks take part; None: all."""

    def traffic(self, rank: int, world_size: int) -> Traffic:
        """What this round costs worker `rank`; a world of one sends nothing.

        >>> Round(op="all_reduce", send_bytes=1000).traffic(rank=0, world_size=4)
        Traffic(sent_bytes=1500, received_bytes=1500, messages=6)
        """
        others = world_size - 1
        if others == 0 or (self.ranks is not None and not self.ranks[0] <= rank < self.ranks[1]):
            return Traffic()
        if self.op == "exchange":
            return Traffic(self.send_bytes, self.recv_bytes, int(self.send_bytes > 0))
        if self.op == "broadcast":
            children, parents = _binomial(rank, self.source, world_size)
            return Traffic(children * self.send_bytes, parents * self.send_bytes, children)
        if self.op == "all_reduce":
            half = self.send_bytes * others // world_size
            return Traffic(2 * half, 2 * half, 2 * others)
        if self.op == "all_gather":
            return Traffic(others * self.send_bytes, others * self.send_bytes, others)
        part = self.send_bytes * others // world_size
        return Traffic(part, part, others)


def _binomial(rank: int, source: int, world_size: int) -> tuple[int, int]:
    """How many children and parents a worker has in a broadcast tree rooted at `source`."""
    place = (rank - source) % world_size
    first_hop = place.bit_length()
    hops = (world_size - 1).bit_length()
    children = sum(place + (1 << hop) < world_size for hop in range(first_hop, hops))
    return children, int(place > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The network between two hosts."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The workers a strategy is costed for, joined by equal paths."""

    world_size: int
    path: Path | None = None
    """None where only bytes matter."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The buckets of a model as (number of elements, bytes per element)."""

    buckets: tuple[tuple[int, int], ...]
    """Their gradients, with the bookkeeping that travels along."""
    parameters: tuple[tuple[int, int], ...] = ()
    """Their parameters."""
    momenta: int = 0
    """Numbers that the optimizer keeps for every parameter: 1 for momentum, 2 for Adam's moments."""
    exact: tuple[int, ...] = ()
    """How many of each bucket's gradients must arrive exact (small tensors, bookkeeping); none if empty."""

    def bucket_bytes(self) -> list[int]:
        return [numel * itemsize for numel, itemsize in self.buckets]


def total(rounds: Iterable[Round], *, rank: int, world_size: int) -> Traffic:
    """The traffic of several rounds together."""
    return sum((each.traffic(rank, world_size) for each in rounds), Traffic())
