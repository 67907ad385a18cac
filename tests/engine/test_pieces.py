"""In which order pieces go out, and that it follows the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from thinwire.engine.bucket_plan import make_buckets
from thinwire.engine.driver import Task
from thinwire.engine.pieces import FIRST_AGREEMENT, Pieces, Profile, send_order
from thinwire.engine.reducer import Launcher
from thinwire.strategies.base import Gradients
from thinwire.wire.work import Work

PIECE_BYTES = 400
"""A quarter of each bucket."""
BACKWARD_S = 0.1


@dataclass
class _SlowWire:
    """Sends one piece after another, in virtual seconds; a launcher with a clock."""

    piece_s: float
    now_s: float = 0.0
    agreements: int = 0
    sent: list[int] = field(default_factory=list)
    _free_s: float = 0.0
    _under_way: deque[tuple[float, Work]] = field(default_factory=deque)
    _soon: deque[Callable[[], None]] = field(default_factory=deque)

    def reduce(self, bucket: Gradients, place: int) -> Task:
        work = Work()
        self.sent.append(place)
        self._free_s = max(self._free_s, self.now_s) + self.piece_s
        self._under_way.append((self._free_s, work))
        return cast(Task, work)

    def background(self, call: Callable[[], None]) -> None:
        self._soon.append(call)

    def agree(self, order: list[tuple[int, int]]) -> list[tuple[int, int]]:
        self.agreements += 1
        return order

    def go_on(self, until_s: float) -> None:
        while self._under_way and self._under_way[0][0] <= until_s:
            self.now_s, work = self._under_way.popleft()
            work.finish()
            while self._soon:
                self._soon.popleft()()
        self.now_s = max(until_s, self.now_s)


def _train(pieces: Pieces, wire: _SlowWire, passes: int) -> list[int]:
    """So many passes over four buckets, filled from the last; the buckets of what the last one sent."""
    for _ in range(passes):
        began_s, wire.sent = wire.now_s, []
        pieces.begin(needed=[3, 2, 1, 0])
        for filled in range(4):
            wire.go_on(began_s + (filled + 1) * BACKWARD_S / 4)
            pieces.fill(filled)
        pieces.end()
        wire.go_on(wire.now_s + 1000.0)
    return wire.sent


@pytest.fixture
def wire() -> _SlowWire:
    return _SlowWire(piece_s=0.001)


@pytest.fixture
def pieces(wire: _SlowWire) -> Pieces:
    named = [
        (f"p{n}", Parameter(torch.zeros(397))) for n in range(4)
    ]  # and three numbers of bookkeeping each
    buckets = make_buckets(named, bucket_bytes=1)
    return Pieces(buckets, PIECE_BYTES, cast(Launcher, wire), clock=lambda: wire.now_s)


def test_a_fast_network_sends_as_backward_goes(pieces: Pieces, wire: _SlowWire) -> None:
    assert _train(pieces, wire, FIRST_AGREEMENT + 1) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_a_slow_network_sends_first_what_is_needed_first(pieces: Pieces, wire: _SlowWire) -> None:
    wire.piece_s = 10.0
    sent = _train(pieces, wire, FIRST_AGREEMENT + 1)
    assert sent[0] == 0  # the only one there is
    assert sent[-3:] == [0, 0, 0]  # needed last


def test_the_order_follows_a_network_that_has_become_slow(pieces: Pieces, wire: _SlowWire) -> None:
    as_filled = _train(pieces, wire, FIRST_AGREEMENT + 2)
    wire.piece_s = 10.0
    assert _train(pieces, wire, FIRST_AGREEMENT - 2) == as_filled
    assert _train(pieces, wire, 1)[-3:] == [0, 0, 0]
    assert wire.agreements == 2


def test_beginning_a_pass_again_agrees_with_nobody(pieces: Pieces, wire: _SlowWire) -> None:
    _train(pieces, wire, FIRST_AGREEMENT)
    for _ in range(3):
        pieces.begin(needed=[3, 2, 1, 0])
    assert wire.agreements == 1


times = st.floats(0, 10, allow_nan=False)
profiles = st.lists(
    st.builds(Profile, times, st.integers(0, 20), st.lists(times, min_size=1, max_size=4).map(tuple))
)


@given(profiles)
def test_every_piece_goes_out_once(profiles: list[Profile]) -> None:
    order = send_order(profiles)
    assert sorted(order) == [
        (b, p) for b, profile in enumerate(profiles) for p in range(len(profile.piece_s))
    ]


@given(profiles)
def test_what_is_all_ready_goes_out_in_the_order_of_need(profiles: list[Profile]) -> None:
    ready = [Profile(0.0, p.need, p.piece_s) for p in profiles]
    needs = [ready[b].need for b, _ in send_order(ready)]
    assert needs == sorted(needs)


def forward_starts_after(order: list[tuple[int, int]], profiles: list[Profile]) -> float:
    """When the bucket forward needs first has arrived, for one wire that sends in this order."""
    now, arrived = 0.0, {}
    for bucket, piece in order:
        now = max(now, profiles[bucket].ready_s) + profiles[bucket].piece_s[piece]
        arrived[bucket] = now
    return arrived[min(range(len(profiles)), key=lambda b: profiles[b].need)]


def test_beats_first_in_first_out_where_sending_takes_as_long_as_computing() -> None:
    """Sixteen layers, last one ready first, first one needed first."""
    profiles = [Profile(0.02 * (i + 1), 15 - i, (0.03,)) for i in range(16)]
    fifo = [(i, 0) for i in range(16)]
    assert forward_starts_after(send_order(profiles), profiles) < 0.75 * forward_starts_after(fifo, profiles)
