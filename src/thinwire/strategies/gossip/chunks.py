"""Which part of the model a round sends: the model in equal chunks, and a window that goes round them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

CHUNKS = 256
"""About how many chunks a model is cut into; a round sends at least one."""

Span = tuple[int, int]
"""Start and end (not included) of a range within a bucket."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one bucket."""

    bucket: int
    start: int
    stop: int


@dataclass(slots=True)
class WindowPosition:
    """Where the window stands; the same on all workers, as it only depends on the rounds so far."""

    chunk: int = 0
    """First chunk of the next round."""
    passes: int = 0
    """Times the window has gone round the model, and peers that were left out."""
    rounds: int = 0
    """Rounds in this pass."""

    @property
    def number(self) -> int:
        """Number of the next round in the schedule.

        It is not just a count of rounds: the window goes round in a fixed number of them, as the schedule
        does, and a chunk that always met the same hop of it would never get further. So each pass begins one
        hop on.
        """
        return self.passes + self.rounds

    def leave_out(self) -> None:
        """Have the next chunks go to the peer after the next."""
        self.passes += 1

    def advance(self, count: int, num_chunks: int) -> tuple[int, int]:
        """Move on by one round of `count` chunks: its first chunk, and its number in the schedule."""
        first, number = self.chunk, self.number
        self.chunk += count
        self.rounds += 1
        if self.chunk >= num_chunks:
            self.chunk -= num_chunks
            self.passes += 1
            self.rounds = 0
        return first, number


@dataclass(frozen=True, slots=True)
class Window:
    """The chunks that one round sends."""

    number: int
    """The round's number in the schedule."""
    chunks: Sequence[int]
    spans: dict[int, list[Span]]
    """Spans by bucket; neighbouring chunks are one span."""


class Chunks:
    """A model's buckets cut into pieces of about equal size."""

    def __init__(self, numels: Sequence[int], size: int | None = None) -> None:
        """`size`: numbers in a chunk; by default so many that there are about 256."""
        size = size or chunk_size(numels)
        self.chunks: list[Chunk] = []
        for bucket, numel in enumerate(numels):
            pieces = -(-numel // size)
            bounds = [numel * i // pieces for i in range(pieces + 1)]
            self.chunks += [Chunk(bucket, start, stop) for start, stop in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self.chunks)

    def count(self, share: float) -> int:
        """Chunks of a share of the model, at least one."""
        return min(len(self), max(1, round(share * len(self))))

    def window(self, position: WindowPosition, count: int) -> Window:
        """The next `count` chunks; `position` moves on."""
        first, number = position.advance(count, len(self))
        chunks = sorted((first + i) % len(self) for i in range(count))
        spans: dict[int, list[Span]] = {}
        for each in (self.chunks[i] for i in chunks):
            own = spans.setdefault(each.bucket, [])
            if own and own[-1][1] == each.start:
                own[-1] = (own[-1][0], each.stop)
            else:
                own.append((each.start, each.stop))
        return Window(number, chunks, spans)


def chunk_size(numels: Sequence[int]) -> int:
    """Numbers in a chunk of a model with these buckets."""
    return max(1, -(-sum(numels) // CHUNKS))
