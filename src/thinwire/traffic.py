"""Traffic and rounds: bytes and messages as values, from sizes alone; no torch.

Collectives are counted the way the backends send them (ring all-reduce and all-gather, binomial
broadcast), for one worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
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

    @lru_cache(maxsize=1024)  # noqa: B019  # of values that hold nothing; mostly the same few are sent again
    def traffic(self, rank: int, world_size: int) -> Traffic:
        """What this round costs worker `rank`; a world of one sends nothing.

        >>> Round(op="all_reduce", send_bytes=1000).traffic(rank=0, world_size=4)
        Traffic(sent_bytes=1500, received_bytes=1500, messages=6)
        """
        others = world_size - 1
        if others == 0:
            return Traffic()
        if self.op == "exchange":
            return Traffic(self.send_bytes, self.recv_bytes, int(self.send_bytes > 0))
        if self.op == "broadcast":
            # a binomial tree: the place in it says how many children a worker has
            place, hops = (rank - self.source) % world_size, others.bit_length()
            children = sum(place + (1 << hop) < world_size for hop in range(place.bit_length(), hops))
            return Traffic(children * self.send_bytes, (place > 0) * self.send_bytes, children)
        if self.op == "all_reduce":
            half = self.send_bytes * others // world_size
            return Traffic(2 * half, 2 * half, 2 * others)
        if self.op == "all_gather":
            return Traffic(others * self.send_bytes, others * self.send_bytes, others)
        part = self.send_bytes * others // world_size
        return Traffic(part, part, others)
