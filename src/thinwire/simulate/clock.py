"""Virtual time: the clock, a local world on it, and how long its workers compute."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.errors import check
from thinwire.simulate.network import Network
from thinwire.traffic import Round
from thinwire.wire.local import LocalWorld
from thinwire.wire.work import Work

Call = Callable[[], object]
FORWARD_SHARE = 1 / 3
"""Forward's part of the computing time; the gradients of data and of weights take one forward each."""


class Clock:
    """Time passes only from one call to the next. Calls of one moment run in the order they were made.

    >>> clock, seen = Clock(), []
    >>> clock.at(2.0, lambda: seen.append(clock.now_s))
    >>> clock.at(1.0, lambda: seen.append(clock.now_s))
    >>> clock.run()
    >>> seen
    [1.0, 2.0]
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._later: list[tuple[float, int, Call]] = []
        self._soon: deque[Call] = deque()
        self._moment: list[Work] = []
        self._number = itertools.count()

    def soon(self, call: Call) -> None:
        """Call at this moment, after what runs now."""
        self._soon.append(call)

    def at(self, time_s: float, call: Call) -> None:
        """Call at a time; one that is past means now."""
        heapq.heappush(self._later, (max(time_s, self.now_s), next(self._number), call))

    def sleep(self, seconds: float) -> Work:
        """A work that ends after `seconds`."""
        work = Work()
        self.at(self.now_s + seconds, work.finish)
        return work

    def moment(self) -> Work:
        """A work that ends when nothing else is left to happen now: workers of one moment go on together."""
        work = Work()
        self._moment.append(work)
        return work

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Make calls until `until` holds, or none is left."""
        while not until():
            if self._soon:
                self._soon.popleft()()
            elif self._later and (self._later[0][0] <= self.now_s or not self._moment):
                self.now_s, _, call = heapq.heappop(self._later)
                call()
            elif self._moment:
                works, self._moment = self._moment, []
                for work in works:
                    work.finish()
            else:
                return


class VirtualMedium:
    """Operations of a local world end when the network says; its rank r sits on `hosts[r]`."""

    def __init__(self, clock: Clock, network: Network, hosts: Sequence[int]) -> None:
        self._clock, self._network, self._hosts = clock, network, hosts
        self._members: tuple[Sequence[int], list[int]] = ((), [])
        """The ranks of the latest collective and their hosts: most are of the same thousands."""

    def now(self) -> float:
        return self._clock.now_s

    def sleep(self, seconds: float) -> Work:
        return self._clock.sleep(seconds)

    def transfer(self, source: int, to: int, num_bytes: int, sent: Call, arrived: Call) -> None:
        ends = (self._hosts[source], self._hosts[to])
        sent_s, here_s = self._network.transfer(*ends, num_bytes, self._clock.now_s)
        self._clock.at(sent_s, sent)
        self._clock.at(here_s, arrived)

    def collective(self, what: Round, ranks: Sequence[int], ended: Call) -> None:
        if ranks is not self._members[0]:
            self._members = (ranks, [self._hosts[rank] for rank in ranks])
        self._clock.at(self._network.collective(what, self._members[1], self._clock.now_s), ended)


def virtual_world(
    clock: Clock, network: Network, hosts: Sequence[int], *, acting: Sequence[int] = ()
) -> LocalWorld:
    """A local world on the clock; with `acting`, these ranks act for all others of their speed."""
    described = network.description.hosts
    places = [(f"host {host}", str(described[host].site)) for host in hosts]
    return LocalWorld(len(hosts), VirtualMedium(clock, network, hosts), places=places, acting=acting)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeModel:
    """How all workers of a simulation compute, in seconds per step at full speed, and send."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    """Seconds of its step after backward: gradients must be there before, and parameters leave after it."""
    shares: tuple[float, ...] | None = None
    """Each trainable parameter's part of the computing time; None: its part of all parameters."""
    bucket_bytes: int | None = None
    """Size of a bucket; None: the default of `attach`."""
    copy_s: float = 0.0
    """Seconds per byte for which training stands still while a bucket is filled, and again while it is
    emptied."""
    select_s: float = 0.0
    """Seconds per byte of a bucket before its `reduce` can send: beside training, one bucket at a time."""
    alike: bool = False
    """Whether one worker acts for all others of its speed; only with sizes."""

    def __post_init__(self) -> None:
        parts = (("forward", self.forward_s), ("backward", self.backward_s), ("optimizer", self.optimizer_s))
        for name, seconds in parts:
            check(0 <= seconds < math.inf, name, "seconds, 0 or more", seconds)

    @staticmethod
    def of(seconds: float, *, bucket_bytes: int | None = None) -> ComputeModel:
        """Divide the seconds of a whole step: a third of it is forward."""
        check(0 <= seconds < math.inf, "compute", "seconds, 0 or more", seconds)
        forward_s, backward_s = seconds * FORWARD_SHARE, seconds * (1 - FORWARD_SHARE)
        return ComputeModel(forward_s=forward_s, backward_s=backward_s, bucket_bytes=bucket_bytes)


class Pace:
    """One host's speed: as described, changed by faults, and with a standard deviation of `jitter`."""

    def __init__(self, speed: float, *, jitter: float = 0.0, seed: Sequence[int] = (0,)) -> None:
        check(0 <= jitter < math.inf, "jitter", "a share of the computing time, 0 or more", jitter)
        self.speed = speed
        self.stopped_until_s = 0.0
        self._full = speed
        self._spread = math.sqrt(math.log1p(jitter**2))
        # ten thousand generators that nobody asks would take a second to make
        self._random = np.random.default_rng(list(seed)) if jitter else None

    def slow(self, speed: float) -> None:
        """Compute at `speed` times the full speed; 1 heals."""
        self.speed = self._full * speed

    def draw(self) -> float:
        """How many times longer than at full speed the coming step takes: log-normal, with a mean of one."""
        if self._random is None:
            return 1 / self.speed
        spread = self._spread
        return math.exp(self._random.normal(-(spread**2) / 2, spread)) / self.speed

    def state_dict(self) -> dict[str, Any]:
        random = None if self._random is None else self._random.bit_generator.state
        return {"speed": self.speed, "random": random}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.speed = saved["speed"]
        if self._random is not None:
            self._random.bit_generator.state = saved["random"]


def timetable(
    shares: Sequence[float], buckets: Sequence[Sequence[int]]
) -> tuple[list[float], list[tuple[int, float]]]:
    """When each bucket is full, and when it is needed.

    First the share of backward that is over when a bucket is full, by bucket; then the buckets in the order
    forward needs them, each with the share of forward that is over by then. A parameter takes its share of
    both. Backward goes from the last parameter to the first, so a bucket is full when its first one is
    reached; forward needs a bucket before its first parameter.
    """
    total = sum(shares)
    before = list(itertools.accumulate((share / total for share in shares), initial=0.0))
    first = [min(members) for members in buckets]
    order = sorted(range(len(buckets)), key=lambda bucket: first[bucket])
    return [1.0 - before[index] for index in first], [(bucket, before[first[bucket]]) for bucket in order]
