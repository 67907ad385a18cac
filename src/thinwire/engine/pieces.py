"""Sends gradients in small pieces, one order for all workers: first what the next forward needs first.

A piece can go out once backward has filled its bucket, and is waited for when forward reaches it. All workers
must send in the same order, so it is computed from one worker's times, and kept until they agree on another.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median_high

import numpy as np
from torch import Tensor

from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.reducer import Launcher
from thinwire.wire.work import Work

MOST_IN_FLIGHT = 4
"""Pieces under way at once, at most: see `in_flight`."""
FINE_SHARE = 3 / 8
"""Part of the buckets, from the first that backward fills, in pieces of half the size. Forward needs them
last, so it is best to have one of them left for the end; they go early only if nothing else is ready."""
LEAST_FINE_BYTES = 128 << 10
"""Smaller pieces are not cut finer: latency is most of what they take."""
PROFILED_PASSES = 3
"""The order is decided by the times of the last so many backward passes."""
FIRST_AGREEMENT = 4
"""The pass before which workers first agree on an order: pass 0, which only counts gradients, is then no
longer among the profiled ones."""
REGULAR_AGREEMENT = 256
"""From there on an order is agreed on every so many passes; before, each time their number has doubled. A
network that has become slower or faster is noticed."""
LOOK_AHEAD = (0.0, 1 / 16, 1 / 8, 1 / 4)
"""Waits for a piece that is needed earlier than those ready, in times of an average piece."""


@dataclass(slots=True)
class Piece:
    """A slice of a bucket's gradient, as a bucket of its own to the strategy."""

    bucket: ParameterBucket
    gradient: Tensor
    exact_from: int = 0
    """All of it: only AllReduce sends pieces."""
    took_s: float = 0.0
    """How long it was under way, in the last pass."""

    @property
    def index(self) -> int:
        return self.bucket.index

    @property
    def step(self) -> int:
        return self.bucket.step


@dataclass(slots=True)
class _Parcel:
    """One bucket's pieces in one pass."""

    pieces: list[Piece]
    works: list[Work] = field(default_factory=list)
    full: bool = False
    full_s: deque[float] = field(default_factory=partial(deque, maxlen=PROFILED_PASSES))
    """When backward filled it, in the last passes."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What one worker has seen of a bucket."""

    ready_s: float
    """When backward fills it, from the start of backward."""
    need: int
    """Its place in the order in which forward needs buckets."""
    piece_s: tuple[float, ...]
    """How long each of its pieces takes on the wire."""


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
        fine = FINE_SHARE * len(buckets) if piece_bytes >= LEAST_FINE_BYTES else 0
        self._parcels = [_Parcel(_cut(b, piece_bytes, fine=b.place < fine)) for b in buckets]
        self._order = [(b, p) for b, parcel in enumerate(self._parcels) for p in range(len(parcel.pieces))]
        self._lock = threading.Lock()
        self._pass = self._agreed_pass = self._issued = self._flying = 0
        self._in_flight = self._limit = 1
        self._began_s = 0.0

    def begin(self, needed: Sequence[int]) -> None:
        """Start a pass; `needed`: buckets in the order in which forward needs them.

        May be repeated, on one worker alone, if a backward fails before it has sent anything.
        """
        if agreement_is_due(self._pass) and self._agreed_pass != self._pass:
            self._order = self._launcher.agree(self._best_order(needed))
            self._agreed_pass = self._pass
        self._issued = 0
        # One at a time in the pass before an agreement: pieces that share the wire tell nothing of latency.
        self._limit = 1 if agreement_is_due(self._pass + 1) else self._in_flight
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
            while self._issued < len(self._order) and self._flying < self._limit:
                index, part = self._order[self._issued]
                if not self._parcels[index].full:
                    return
                self._issued += 1
                self._flying += 1
                self._launch(self._parcels[index], part)

    def _launch(self, parcel: _Parcel, part: int) -> None:
        began_s, piece, work = self._clock(), parcel.pieces[part], parcel.works[part]
        task = self._launcher.reduce(piece, piece.bucket.place)

        def ended() -> None:
            work.fail(task.error) if task.error else work.finish()
            with self._lock:
                piece.took_s = self._clock() - began_s
                self._flying -= 1
            self._issue()

        # Not here and now: the lock is held, and the task may have ended already.
        task.when_done(lambda: self._launcher.background(ended))

    def _best_order(self, needed: Sequence[int]) -> list[tuple[int, int]]:
        """From this worker's times; rank 0's is what all of them use."""
        pieces = [piece for parcel in self._parcels for piece in parcel.pieces]
        with self._lock:
            times_s = [piece.took_s for piece in pieces]
        sizes = [piece.gradient.nbytes for piece in pieces]
        per_byte_s = sum(times_s) / max(sum(sizes), 1)
        # Each worker's own: how far ahead it issues does not change the order.
        self._in_flight = in_flight(sizes, times_s)
        place = {bucket: n for n, bucket in enumerate(needed)}
        profiles = [
            Profile(
                ready_s=median_high(parcel.full_s),
                need=place.get(index, -1),
                piece_s=tuple(piece.gradient.nbytes * per_byte_s for piece in parcel.pieces),
            )
            for index, parcel in enumerate(self._parcels)
        ]
        return send_order(profiles)


def in_flight(sizes: Sequence[int], times_s: Sequence[float]) -> int:
    """How many pieces to have under way, from the time each took alone.

    One at a time comes soonest, as two would share the wire; where latency is a good part of a piece's time,
    others hide it. A line through sizes and times tells the two apart.

    >>> in_flight([100, 200], [1.0, 2.0]), in_flight([100, 200], [3.0, 4.0])
    (1, 3)
    """
    if len(set(sizes)) < 2:
        return 1
    slope, latency_s = np.polyfit(sizes, times_s, 1)
    sending_s = slope * (sum(sizes) / len(sizes))
    if sending_s <= 0:
        return MOST_IN_FLIGHT
    return 1 if latency_s < 0.25 * sending_s else min(MOST_IN_FLIGHT, 1 + math.ceil(latency_s / sending_s))


def agreement_is_due(number: int) -> bool:
    """Whether workers agree on an order before the pass of this number.

    >>> [number for number in range(1030) if agreement_is_due(number)]
    [4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    """
    if number < FIRST_AGREEMENT:
        return False
    return number % REGULAR_AGREEMENT == 0 or (number < REGULAR_AGREEMENT and number.bit_count() == 1)


def _cut(bucket: ParameterBucket, piece_bytes: int, *, fine: bool) -> list[Piece]:
    """Equal pieces of about this size: a short one at the end would cost as much to send."""
    count = max(1, round(bucket.gradient.nbytes / piece_bytes)) * (2 if fine else 1)
    return [Piece(bucket, part) for part in bucket.gradient.tensor_split(count)]


def send_order(profiles: Sequence[Profile]) -> list[tuple[int, int]]:
    """Pieces as (bucket, piece): whenever the wire is free, the first needed of those ready, or ready soon.

    Of a few ways to look ahead, the one with which the next forward would end first.

    >>> early, late = Profile(0.0, 1, (1.0, 1.0)), Profile(1.5, 0, (1.0,))
    >>> send_order([early, late])
    [(0, 0), (0, 1), (1, 0)]
    >>> send_order([early, Profile(0.5, 0, (1.0,))])
    [(0, 0), (1, 0), (0, 1)]
    """
    pieces = [piece_s for profile in profiles for piece_s in profile.piece_s]
    average_s = sum(pieces) / max(1, len(pieces))
    tried = [_greedy(profiles, share * average_s) for share in LOOK_AHEAD]
    return min(tried, key=lambda found: _forward_end(profiles, found[1]))[0]


def _greedy(profiles: Sequence[Profile], wait_s: float) -> tuple[list[tuple[int, int]], list[float]]:
    """An order, and when each bucket has arrived."""
    waiting = {(b, p) for b, profile in enumerate(profiles) for p in range(len(profile.piece_s))}
    order, arrived_s, now_s = [], [0.0] * len(profiles), 0.0
    while waiting:
        now_s = max(now_s, min(profiles[b].ready_s for b, _ in waiting))
        ready = [(b, p) for b, p in waiting if profiles[b].ready_s <= now_s]
        chosen = min(ready, key=lambda piece: (profiles[piece[0]].need, piece))
        soon = [
            profiles[b].ready_s
            for b, _ in waiting
            if now_s < profiles[b].ready_s <= now_s + wait_s and profiles[b].need < profiles[chosen[0]].need
        ]
        if soon:
            now_s = min(soon)
            continue
        waiting.remove(chosen)
        order.append(chosen)
        now_s += profiles[chosen[0]].piece_s[chosen[1]]
        arrived_s[chosen[0]] = now_s
    return order, arrived_s


def _forward_end(profiles: Sequence[Profile], arrived_s: Sequence[float]) -> float:
    """When forward ends, if it takes half as long for a bucket as backward did."""
    by_ready = sorted(range(len(profiles)), key=lambda b: profiles[b].ready_s)
    filled_s = [0.0, *(profiles[b].ready_s for b in by_ready)]
    backward_s = {b: filled_s[i + 1] - filled_s[i] for i, b in enumerate(by_ready)}
    now_s = filled_s[-1]
    for bucket in sorted(range(len(profiles)), key=lambda b: profiles[b].need):
        now_s = max(now_s, arrived_s[bucket]) + backward_s[bucket] / 2
    return now_s
