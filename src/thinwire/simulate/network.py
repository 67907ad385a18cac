"""How long transfers take: cards and uplinks that serve bytes first come, first served; no torch.

Every host has a card, and every site an uplink, each with two directions that do not disturb each other
(full duplex) and serve bytes in the order they are given, at their rate. A transfer passes through the
sender's card, then the uplinks of both sites if they differ, then the receiver's card; it flows through all
of them at once and ends when the slowest has served it, plus the latency of the path.

A collective begins when its last worker has come. It loads every card with the bytes that
`traffic.Round` states for the worker (a ring for sums and gathers, a binomial tree for broadcasts), and
every uplink with what crosses it; it ends for all when the last of these has served, plus one latency for
each message that has to wait for another. Where messages of a ring of sums have two segments, as in Gloo, one
waits for its latency while the other is sent, so that only the rest of a latency is waited for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thinwire.errors import check
from thinwire.hosts.description import Description
from thinwire.traffic import Round


@dataclass(slots=True)
class _Direction:
    """One direction of a card or an uplink."""

    bytes_per_s: float
    free_s: float = 0.0

    def serve(self, begin_s: float, num_bytes: float) -> tuple[float, float]:
        """When the first and when the last byte is through."""
        first_s = max(begin_s, self.free_s)
        self.free_s = first_s + num_bytes / self.bytes_per_s
        return first_s, self.free_s


class Network:
    """Hosts as described, with a latency between any two of them, another where a path leaves a site, and
    one of each message that waits for another in a collective, where that is known apart."""

    def __init__(
        self,
        description: Description,
        *,
        latency_s: float = 0.0,
        uplink_latency_s: float = 0.0,
        hop_s: float | None = None,
        segments: int = 1,
    ) -> None:
        """`segments`: of each message in a ring of sums; two in Gloo."""
        hop_s = latency_s if hop_s is None else hop_s
        times = {"latency": latency_s, "uplink latency": uplink_latency_s, "hop of a collective": hop_s}
        for field, seconds in times.items():
            check(0 <= seconds < math.inf, field, "seconds, 0 or more", seconds)
        self.description, self._segments = description, segments
        self._latency_s, self._uplink_latency_s, self._hop_s = latency_s, uplink_latency_s, hop_s
        self._site = [host.site for host in description.hosts]
        rates = [host.rate_bit_per_s for host in description.hosts]
        self._out, self._in = ([_Direction(rate / 8) for rate in rates] for _ in range(2))
        self._played: Sequence[int] | None = None
        uplink = description.uplink_bit_per_s
        uplinks = [] if uplink is None else [uplink] * description.num_sites
        self._up, self._down = ([_Direction(rate / 8) for rate in uplinks] for _ in range(2))

    def rest(self, played: Sequence[int] | None = None) -> None:
        """Everything is free again, for a clock that begins anew.

        `played`: hosts whose cards stand for those of all others; the rest send and receive the same.
        """
        self._played = played
        for direction in self._directions() if played is None else self._directions_of(played):
            direction.free_s = 0.0

    def state_dict(self) -> list[float]:
        """When each direction is free."""
        return [direction.free_s for direction in self._directions()]

    def load_state_dict(self, saved: Sequence[float]) -> None:
        for direction, free_s in zip(self._directions(), saved, strict=True):
            direction.free_s = free_s

    def _directions(self) -> list[_Direction]:
        return [*self._out, *self._in, *self._up, *self._down]

    def _directions_of(self, hosts: Sequence[int]) -> list[_Direction]:
        return [*(card[host] for card in (self._out, self._in) for host in hosts), *self._up, *self._down]

    @cached_property
    def kinds(self) -> Mapping[int, int]:
        """By host: the first one of its kind, with the same speed, rate and site."""
        firsts = dict[tuple[float, float, int], int]()
        hosts = self.description.hosts
        return {h.index: firsts.setdefault((h.speed, h.rate_bit_per_s, h.site), h.index) for h in hosts}

    @cached_property
    def num_alike(self) -> Counter[int]:
        """How many hosts each first one of a kind stands for."""
        return Counter(self.kinds.values())

    def cut(self, host: int | None, site: int | None, until_s: float) -> None:
        """Nothing that is not under way yet passes before `until_s`."""
        index, sides = (site, (self._up, self._down)) if host is None else (host, (self._out, self._in))
        assert index is not None
        for side in sides:
            side[index].free_s = max(side[index].free_s, until_s)

    def transfer(self, source: int, to: int, num_bytes: int, now_s: float) -> tuple[float, float]:
        """When the sender has sent all of it, and when the receiver has it."""
        route, latency_s = [self._out[source]], self._latency_s
        if self._site[source] != self._site[to]:
            route += [self._up[self._site[source]], self._down[self._site[to]]]
            latency_s += self._uplink_latency_s
        route.append(self._in[to])
        first_s, served_s = now_s, []
        for direction in route:
            first_s, last_s = direction.serve(first_s, num_bytes)
            served_s.append(last_s)
        return served_s[0], max(served_s) + latency_s

    def collective(self, what: Round, members: Sequence[int], now_s: float) -> float:
        """When it ends; `members` are hosts in order of rank, all of whom have come."""
        world_size, latency_s = len(members), self._hop_s
        loads: list[tuple[_Direction, float]] = []
        for rank, host in enumerate(members) if self._played is None else ((p, p) for p in self._played):
            traffic = what.traffic(rank, world_size)
            loads += [(self._out[host], traffic.sent_bytes), (self._in[host], traffic.received_bytes)]
        if self._up and len({self._site[host] for host in members}) > 1:
            latency_s += self._uplink_latency_s
            for site, num_bytes in self._crossing(what, members).items():
                loads += [(self._up[site], num_bytes), (self._down[site], num_bytes)]
        end_s = max(direction.serve(now_s, num_bytes)[1] for direction, num_bytes in loads)
        # Messages that follow one another are as many as one worker sends, in a tree the one it starts from.
        messages = what.traffic(what.source, world_size).messages
        waited_s = messages * latency_s
        if what.op == "all_reduce" and messages and self._segments > 1:
            slowest = min(direction.bytes_per_s for direction, _ in loads)
            segment_s = what.send_bytes / world_size / self._segments / slowest
            waited_s -= (messages - 1) * min(latency_s, segment_s)
        return end_s + waited_s

    def _crossing(self, what: Round, members: Sequence[int]) -> dict[int, float]:
        """Bytes that leave, and that enter, each site: of a ring in order of rank, or of all pairs."""
        world_size = len(members)
        sites = [self._site[host] for host in members]
        if what.op == "broadcast":  # a tree by rank enters a contiguous site about once
            return dict.fromkeys(sites, float(what.send_bytes))
        if what.op == "all_to_all":
            inside = Counter(sites)
            return {s: what.send_bytes / world_size * n * (world_size - n) for s, n in inside.items()}
        crossing = dict.fromkeys(sites, 0.0)
        for rank, site in enumerate(sites):
            if sites[(rank + 1) % world_size] != site:
                crossing[site] += what.traffic(rank, world_size).sent_bytes
        return crossing
