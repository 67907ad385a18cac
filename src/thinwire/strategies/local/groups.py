"""Who is near whom: groups of workers by host, by site, by measured paths, or so many in order of rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch

from thinwire.errors import check
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work

Nearness = Literal["host", "site", "measured"]
Groups = list[list[int]]
PROBE_BYTES = 1 << 17
PROBES = 3
"""Probes of every path: the fastest of them was disturbed least."""
DISTINCT = 3.0
"""Paths differ if some take this many times as long as others."""

_log = logging.getLogger("thinwire")


class Neighbours:
    """The groups of one strategy, found out at every start; `measured` ones when they are first asked for."""

    def __init__(self, by: Nearness | int, owner: str, wire: Wire) -> None:
        """`owner`: the setting, for messages."""
        self._groups: Groups | None = None
        self._known: Work | None = None
        if isinstance(by, int):
            ranks = list(range(wire.world_size))
            rule = f"a number that divides the {wire.world_size} workers"
            check(by >= 1 and wire.world_size % by == 0, owner, rule, by)
            self._groups = [ranks[first : first + by] for first in range(0, wire.world_size, by)]
        elif by != "measured":
            self._groups = wire.hosts() if by == "host" else wire.sites()

    async def groups(self, wire: Wire) -> Groups:
        """All groups. The first that asks measures, which must be the same coroutine on all workers."""
        if self._groups is None and self._known is None:
            self._known = Work()
            self._groups = by_paths(await path_times(wire))
            if wire.rank == 0:
                _log.info("groups by measured paths: %s", self._groups)
            self._known.finish()
        elif self._groups is None:
            assert self._known is not None
            await self._known
        assert self._groups is not None
        return self._groups

    async def own(self, wire: Wire) -> list[int]:
        """The group of this worker."""
        return group_of(wire.rank, await self.groups(wire))


def group_of(rank: int, groups: Groups) -> list[int]:
    """The group that a worker is in."""
    return next(group for group in groups if rank in group)


async def path_times(wire: Wire) -> list[list[float]]:
    """Seconds that a probe takes between any two workers, both ways at once; the same numbers on all."""
    world_size, own = wire.world_size, torch.zeros(wire.world_size, dtype=torch.float64)
    probe = torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    inbox = torch.empty_like(probe)
    for peer in meetings(wire.rank, world_size):
        if peer is None:
            continue
        times_s = []
        for _ in range(PROBES):
            began_s = wire.now()
            await wire.exchange(send=probe, to=peer, recv=inbox, source=peer)
            times_s.append(wire.now() - began_s)
        own[peer] = min(times_s)
    everyones = own.new_empty(world_size * world_size)
    await wire.all_gather(own, everyones)
    table = everyones.view(world_size, world_size)
    times: list[list[float]] = torch.minimum(table, table.T).tolist()  # of the two, the one disturbed less
    return times


def meetings(rank: int, world_size: int) -> list[int | None]:
    """The peer a worker meets in each round, so that all pairs meet once; None: no peer.

    >>> [meetings(rank, 4) for rank in range(4)]
    [[3, 1, 2], [2, 0, 3], [1, 3, 0], [0, 2, 1]]
    """
    last = world_size - 1 + world_size % 2  # that one stands still while the others rotate around it
    found: list[int | None] = []
    for round_ in range(last):
        if rank == last:
            peer = round_ * (last + 1) // 2 % last
        else:
            peer = (round_ - rank) % last
            peer = last if peer == rank else peer
        found.append(peer if peer < world_size else None)
    return found


def by_paths(times_s: Sequence[Sequence[float]]) -> Groups:
    """Workers that are joined by fast paths, directly or over others. The border between fast and slow is the
    widest gap between the times of all paths; where they hardly differ, all are near each other.

    >>> near, far = 0.001, 0.05
    >>> by_paths([[0, near, far, far], [near, 0, far, far], [far, far, 0, near], [far, far, near, 0]])
    [[0, 1], [2, 3]]
    >>> by_paths([[0, 1.0, 1.2], [1.0, 0, 1.1], [1.2, 1.1, 0]])
    [[0, 1, 2]]
    """
    ranks = range(len(times_s))
    paths = sorted(times_s[a][b] for a in ranks for b in ranks if a < b)
    gaps = [(slow / max(fast, 1e-9), fast) for fast, slow in pairwise(paths)]
    widest, limit_s = max(gaps, default=(1.0, 0.0))
    if widest < DISTINCT:
        return [list(ranks)]
    group = list(ranks)  # by worker: the lowest rank that it is joined to
    for a in ranks:
        for b in ranks:
            if a < b and times_s[a][b] <= limit_s:
                low, high = sorted((group[a], group[b]))
                group = [low if each == high else each for each in group]
    return [[rank for rank in ranks if group[rank] == first] for first in sorted(set(group))]
