"""What a user should look at, from what the doctor has measured; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from thinwire.planner.probe import HostFacts, HostPath
from thinwire.units import as_rate, as_seconds

SLOW = 0.7
"""A host counts as slow below this share of the median."""
SKEW_S = 0.1
"""Clocks that differ by more make logs of several hosts hard to compare."""
STALLED = 0.8
"""Sending counts as slowed down by computing below this share of the idle rate."""


def findings(
    hosts: Sequence[HostFacts],
    paths: Sequence[HostPath],
    rates: Mapping[int, float],
    speeds: Sequence[float],
    idle_bit_per_s: float,
    busy_bit_per_s: float,
) -> list[str]:
    """One sentence each; `rates` by rank, `speeds` in order of rank."""
    found = [*_paths(hosts, paths, rates), *_workers(hosts, speeds), *_hosts(hosts, paths)]
    if busy_bit_per_s < STALLED * idle_bit_per_s:
        rate, idle = as_rate(busy_bit_per_s), as_rate(idle_bit_per_s)
        words = f"sending slows down beside computing: {rate}, idle {idle}"
        found.append(f"{words}: leave a core free for it (OMP_NUM_THREADS)")
    return found


def _paths(
    hosts: Sequence[HostFacts], paths: Sequence[HostPath], rates: Mapping[int, float]
) -> Iterator[str]:
    usual = statistics.median_high(rates.values())
    slow = {rank for rank, rate in rates.items() if rate < SLOW * usual}
    for rank in sorted(slow):
        host, rate = hosts[rank], as_rate(float(f"{rates[rank]:.3g}"))
        words = f"{host.name} ({host.interface}) sends and receives {rate}, others {as_rate(usual)}"
        yield f"slow path: {words}: look at its cable, port, or interface"
    for path in paths:
        least = min(rates[rank] for rank in path.ranks)
        if path.bit_per_s < SLOW * least and not slow & set(path.ranks):
            names = " and ".join(hosts[rank].name for rank in path.ranks)
            yield f"slow path: {names} reach {as_rate(float(f'{path.bit_per_s:.3g}'))} with each other"


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
