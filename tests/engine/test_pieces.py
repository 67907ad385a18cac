"""In which order pieces go out, and that it follows the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from torch.nn import Parameter

from thinwire.engine.buckets import make_buckets
from thinwire.engine.driver import Task
from thinwire.engine.pieces import FIRST_AGREEMENT, Pieces
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
