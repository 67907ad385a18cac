"""What a user should look at, from what the doctor has measured; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from thinwire.planner.probe import HostFacts, HostPath
from thinwire.units import as_rate, as_seconds

SLOW = 0.7
"""A host counts as slow if its best try is below this share of what others reach."""
SKEW_S = 0.1
"""Clocks that differ by more make logs of several hosts hard to compare."""
UNSTEADY = 0.7
"""A path's tries vary if their median is below this share of the best."""
STALLED = 0.8
"""Sending counts as slowed down by computing below this share of the idle rate."""


def findings(
    hosts: Sequence[HostFacts],
    paths: Sequence[HostPath],
    speeds: Sequence[float],
    idle_bit_per_s: float,
    busy_bit_per_s: float,
) -> list[str]:
    """One sentence each; `speeds` in order of rank."""
    found = [*_paths(hosts, paths), *_workers(hosts, speeds), *_hosts(hosts, paths)]
    if busy_bit_per_s < STALLED * idle_bit_per_s:
        rate, idle = as_rate(busy_bit_per_s), as_rate(idle_bit_per_s)
        words = f"sending slows down beside computing: {rate}, idle {idle}"
        found.append(f"{words}: leave a core free for it (OMP_NUM_THREADS)")
    return found


def _paths(hosts: Sequence[HostFacts], paths: Sequence[HostPath]) -> Iterator[str]:
    best = {host.rank: statistics.median(_of(paths, host.rank, "best_bit_per_s")) for host in hosts}
    usual = statistics.median_high(best.values())
    slow = {rank for rank, rate in best.items() if rate < SLOW * usual}
    for rank in sorted(slow):
        host, rates = hosts[rank], _of(paths, rank, "bit_per_s")
        rate, most = (_short(statistics.median(rates)), _short(best[rank]))
        own = f"{host.name} ({host.interface}) sends and receives {rate} (at best {most})"
        words = f"{own}, others {_short(usual)}"
        yield f"slow path: {words}: look at its cable, port, or interface"
    for path in paths:
        least = min(best[rank] for rank in path.ranks)
        steady = path.bit_per_s >= UNSTEADY * path.best_bit_per_s
        if steady and path.best_bit_per_s < SLOW * least and not slow & set(path.ranks):
            names = " and ".join(hosts[rank].name for rank in path.ranks)
            yield f"slow path: {names} reach {_short(path.bit_per_s)} with each other"
    unsteady = [path for path in paths if path.bit_per_s < UNSTEADY * path.best_bit_per_s]
    if unsteady:
        worst = min(unsteady, key=lambda path: path.bit_per_s / path.best_bit_per_s)
        names = " and ".join(hosts[rank].name for rank in worst.ranks)
        reached = f"{_short(worst.bit_per_s)} in the middle and {_short(worst.best_bit_per_s)} at best"
        words = f"{len(unsteady)} of {len(paths)} paths vary, most between {names}: {reached}"
        yield f"unsteady: {words}; does something else use the hosts or the network? then measure again"


def _of(paths: Sequence[HostPath], rank: int, field: str) -> list[float]:
    """A number of each path of a host."""
    return [getattr(path, field) for path in paths if rank in path.ranks]


def _short(bit_per_s: float) -> str:
    return as_rate(float(f"{bit_per_s:.3g}"))


def _workers(hosts: Sequence[HostFacts], speeds: Sequence[float]) -> Iterator[str]:
    usual = statistics.median_high(speeds)
    for host, speed in zip(hosts, speeds, strict=True):
        if speed < SLOW * usual:
            words = f"{host.name} computes at {speed / usual:.2f} of the others' speed"
            yield f"slow worker: {words}: all others wait for it, unless the strategy does not make them"


def _hosts(hosts: Sequence[HostFacts], paths: Sequence[HostPath]) -> Iterator[str]:
    several = len({host.machine for host in hosts}) > 1
    for host in hosts:
        if host.interface == "lo" and several:
            words = f"wrong interface: {host.name} uses {host.address} (lo)"
            yield f"{words}: set GLOO_SOCKET_IFNAME, or correct its name in /etc/hosts"
    for path in paths:
        if path.ranks[0] == 0 and abs(path.skew_s) > SKEW_S:
            name = hosts[path.ranks[1]].name
            yield f"the clock of {name} is off by {as_seconds(abs(path.skew_s))}: start NTP there"
    for field in ("python", "torch", "thinwire"):
        versions = {getattr(host, field): host.name for host in hosts}
        if len(versions) > 1:
            listed = ", ".join(f"{value} on {name}" for value, name in versions.items())
            yield f"versions of {field} differ: {listed}"
