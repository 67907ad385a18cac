"""The virtual clock, calls in order of time and nothing in between; and a local world on it."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from thinwire.simulate.network import Network
from thinwire.traffic import Round
from thinwire.wire.local import LocalWorld
from thinwire.wire.work import Work

Call = Callable[[], object]


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
        """A work that ends after so many seconds."""
        work = Work()
        self.at(self.now_s + seconds, work.finish)
        return work

    def moment(self) -> Work:
        """A work that ends when nothing else is left to happen now: workers of one moment go on together."""
        work = Work()
        self._moment.append(work)
        return work

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until that is so, or nothing is left to call."""
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

    def now(self) -> float:
        return self._clock.now_s

    def transfer(self, source: int, to: int, num_bytes: int, sent: Call, arrived: Call) -> None:
        ends = (self._hosts[source], self._hosts[to])
        sent_s, here_s = self._network.transfer(*ends, num_bytes, self._clock.now_s)
        self._clock.at(sent_s, sent)
        self._clock.at(here_s, arrived)

    def collective(self, what: Round, ranks: Sequence[int], ended: Call) -> None:
        hosts = [self._hosts[rank] for rank in ranks]
        self._clock.at(self._network.collective(what, hosts, self._clock.now_s), ended)


def virtual_world(
    clock: Clock, network: Network, hosts: Sequence[int], *, acting: Sequence[int] = ()
) -> LocalWorld:
    """A local world on the clock; with `acting`, these ranks act for all others of their speed."""
    described = network.description.hosts
    places = [(f"host {host}", str(described[host].site)) for host in hosts]
    return LocalWorld(len(hosts), VirtualMedium(clock, network, hosts), places=places, acting=acting)
