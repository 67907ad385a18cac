"""Sends gradients in small pieces, one order for all workers: first what the next forward needs first."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.order import Profile, send_order
from thinwire.engine.reducer import Launcher
from thinwire.wire.base import Work

IN_FLIGHT = 2
"""Pieces under way at once: one on the wire, one ready to follow."""
PROFILED_PASSES = 3
"""The order is decided by the times of the last so many backward passes."""
FIRST_AGREEMENT = 4
"""The pass before which workers first agree on an order: pass 0, which only counts gradients, is then no
longer among the profiled ones."""
REGULAR_AGREEMENT = 256
"""From there on an order is agreed on every so many passes; before, each time their number has doubled. A
network that has become slower or faster is noticed."""


def _last() -> deque[float]:
    return deque(maxlen=PROFILED_PASSES)


@dataclass(slots=True)
class Piece:
    """A slice of a bucket's gradient, as a bucket of its own to the strategy."""

    index: int
    gradient: Tensor
    exact_from: int = 0
    """All of it: only AllReduce sends pieces."""
    took_s: deque[float] = field(default_factory=_last)
    """How long it was under way, in the last passes."""


@dataclass(slots=True)
class _Parcel:
    """One bucket's pieces in one pass."""

    pieces: list[Piece]
    works: list[Work] = field(default_factory=list)
    full: bool = False
    full_s: deque[float] = field(default_factory=_last)
    """When backward filled it, in the last passes."""


class Pieces:
    """The gradients of one pass after the other on their way over the wire."""

    def __init__(
        self,
        buckets: Sequence[ParameterBucket],
        piece_bytes: int,
        launcher: Launcher,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._launcher = launcher
        self._clock = clock
        self._parcels = [_Parcel(_cut(bucket, piece_bytes)) for bucket in buckets]
        self._order = [(b, p) for b, parcel in enumerate(self._parcels) for p in range(len(parcel.pieces))]
        self._agreed_pass = 0
        self._lock = threading.Lock()
        self._issued = 0
        self._flying = 0
        self._pass = 0
        self._began_s = 0.0

    def all(self) -> list[Piece]:
        """What goes over the wire in one pass."""
        return [piece for parcel in self._parcels for piece in parcel.pieces]

    def begin(self, needed: Sequence[int]) -> None:
        """Start a pass; `needed`: buckets in the order in which forward needs them.

        May be repeated, on one worker alone, if a backward fails before it has sent anything.
        """
        if agreement_is_due(self._pass) and self._agreed_pass != self._pass:
            self._order = self._launcher.agree(self._best_order(needed))
            self._agreed_pass = self._pass
        self._issued = 0
        self._began_s = self._clock()
        for parcel in self._parcels:
            parcel.full, parcel.works = False, [Work() for _ in parcel.pieces]

    def full(self, index: int) -> bool:
        return self._parcels[index].full

    def fill(self, index: int) -> None:
        """A bucket's gradients are in place."""
        parcel = self._parcels[index]
        parcel.full = True
        parcel.full_s.append(self._clock() - self._began_s)
        self._issue()

    def end(self) -> None:
        """Every bucket is full."""
        self._pass += 1

    def works(self, index: int) -> list[Work]:
        """What to wait for until a bucket's gradients are reduced."""
        return self._parcels[index].works

    def _issue(self) -> None:
        """Send the next pieces of the agreed order, if they are ready and the wire is free."""
        with self._lock:
            while self._issued < len(self._order) and self._flying < IN_FLIGHT:
                index, part = self._order[self._issued]
                if not self._parcels[index].full:
                    return
                self._issued += 1
                self._flying += 1
                self._launch(self._parcels[index], part)

    def _launch(self, parcel: _Parcel, part: int) -> None:
        began_s, piece, work = self._clock(), parcel.pieces[part], parcel.works[part]
        task = self._launcher.reduce(piece)

        def ended() -> None:
            work.fail(task.error) if task.error else work.finish()
            with self._lock:
                piece.took_s.append(self._clock() - began_s)
                self._flying -= 1
            self._issue()

        # Not here and now: the lock is held, and the task may have ended already.
        task.when_done(lambda: self._launcher.soon(ended))

    def _best_order(self, needed: Sequence[int]) -> list[tuple[int, int]]:
        """From this worker's times; rank 0's is what all of them use."""
        pieces = [piece for parcel in self._parcels for piece in parcel.pieces]
        with self._lock:
            took_s = sum(_median(piece.took_s) for piece in pieces)
        # Pieces overlap, so a piece's own time counts the wire IN_FLIGHT times.
        per_byte_s = took_s / max(sum(piece.gradient.nbytes for piece in pieces), 1) / IN_FLIGHT
        place = {bucket: n for n, bucket in enumerate(needed)}
        profiles = [
            Profile(
                ready_s=_median(parcel.full_s),
                need=place.get(index, -1),
                piece_s=tuple(piece.gradient.nbytes * per_byte_s for piece in parcel.pieces),
            )
            for index, parcel in enumerate(self._parcels)
        ]
        return send_order(profiles)


def agreement_is_due(number: int) -> bool:
    """Whether workers agree on an order before the pass of this number.

    >>> [number for number in range(1030) if agreement_is_due(number)]
    [4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    """
    if number < FIRST_AGREEMENT:
        return False
    return number % REGULAR_AGREEMENT == 0 or (number < REGULAR_AGREEMENT and number.bit_count() == 1)


def _median(times_s: deque[float]) -> float:
    return sorted(times_s)[len(times_s) // 2] if times_s else 0.0


def _cut(bucket: ParameterBucket, piece_bytes: int) -> list[Piece]:
    """Equal pieces of about this size: a short one at the end would cost as much to send."""
    count = max(1, round(bucket.gradient.nbytes / piece_bytes))
    return [Piece(bucket.index, part) for part in bucket.gradient.tensor_split(count)]
