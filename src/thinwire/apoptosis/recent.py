"""The calls of a model that an event looks at: those of the last steps before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from thinwire.apoptosis.calls import Call, join
from thinwire.apoptosis.moments import FEWEST_NEURONS
from thinwire.apoptosis.plan import MOST_WEIGHED
from thinwire.apoptosis.units import Group

ROWS_PER_NEURON = 2
"""Samples on which an event decides, of all workers together, for each neuron that is weighed at once."""


class RecentCalls:
    """Copies of the last calls, no more than the next event needs."""

    def __init__(self, num_workers: int) -> None:
        self.joins = False
        """Whether several calls can be made as one."""
        self._num_workers = num_workers
        self._calls: deque[Call] = deque()
        self._rows, self._at_once = 0, 1
        """Samples in one call, and calls in one step."""
        self._widest = MOST_WEIGHED
        """Neurons that the next event weighs at once, at most."""

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def last(self) -> Call:
        return self._calls[-1]

    @property
    def num_steps(self) -> int:
        """Steps whose calls an event looks at."""
        return -(-ROWS_PER_NEURON * self._widest // max(1, self._rows * self._num_workers))

    def measure(self, given: Call, *, at_once: int) -> None:
        """Learn how large a call is; `at_once`: calls in every step."""
        self._rows, self._at_once = given.rows() or self._rows, at_once

    def add(self, given: Call) -> None:
        self._calls.append(given.copy())
        self._forget()

    def expect(self, groups: Sequence[Group]) -> None:
        """The next event weighs these: fewer calls may do."""
        widest = max((group.size for group in groups if not group.frozen), default=0)
        self._widest = max(FEWEST_NEURONS, min(widest, MOST_WEIGHED))
        self._forget()

    def clear(self) -> None:
        self._calls.clear()

    def to_measure(self) -> list[Call]:
        """The same samples in as few calls as can be."""
        return join(list(self._calls)) if self.joins else list(self._calls)

    def _forget(self) -> None:
        while len(self._calls) > self.num_steps * self._at_once:
            self._calls.popleft()
