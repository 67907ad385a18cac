"""The machines and the network a plan is for: stated, or as `thinwire doctor` measured them; no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from thinwire.checked_json import fits, parse_json
from thinwire.errors import DataError, SettingError, check, check_count
from thinwire.files import read_regular
from thinwire.hosts.description import Description, Host
from thinwire.hosts.quantities import check_rate, format_rate

FORMAT = "thinwire cluster 1"
MOST_BYTES = 1 << 26
STATED_SPREAD = 0.1
"""How far a stated rate or time may be off: nobody has measured it."""
SAME = 1.1
"""Rates and speeds that differ by less than this factor count as equal: measurements vary as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterHost:
    """One worker's host."""

    name: str
    rate_bit_per_s: float
    """Rate in each direction, while all hosts send and compute."""
    speed: float = 1.0
    """Computing speed relative to the fastest host, which has 1."""
    site: int = 0

    def __post_init__(self) -> None:
        check_rate(self.rate_bit_per_s, field=f"rate of {self.name}")
        check(0 < self.speed <= 1, f"speed of {self.name}", "above 0 and at most 1", self.speed)
        check(0 <= self.site < 100_000, f"site of {self.name}", "a number of a site from 0 on", self.site)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Hosts, latencies, and the constants of one worker's host arithmetic."""

    hosts: tuple[ClusterHost, ...]
    latency_s: float
    """Latency of one message between two hosts."""
    hop_s: float | None = None
    """Latency of each of the successive messages of a collective; None: `latency_s`."""
    ring_segments: int = 2
    """Segments of each message in a ring of sums: Gloo sends two, so that one hides the other's latency."""
    uplink_bit_per_s: float | None = None
    uplink_latency_s: float = 0.0
    copy_bytes_per_s: float | None = None
    """Rate of a worker's copies in memory, beside computing; None: they take no time."""
    select_numbers_per_s: float | None = None
    """Rate at which a worker finds the largest among gradients; None: that takes no time."""
    workers_per_machine: int = 1
    """Workers on each machine; above 1 in a lab, whose hosts share the processors of one machine."""
    cores_per_worker: float | None = None
    """Cores of each worker, below 1 in a lab of more hosts than cores; None: enough for all that runs."""
    processor_s_per_byte: float = 0.0
    """Processor seconds that sending a byte, and receiving one meanwhile, takes from computing."""
    spread: float = STATED_SPREAD
    """How far rates and times may be off: 0.1 is a tenth."""
    measured: str = ""
    """When and where it was measured; empty if it is stated."""

    def __post_init__(self) -> None:
        check(len(self.hosts) >= 1, "hosts", "at least 1", len(self.hosts))
        for field in ("latency_s", "hop_s", "uplink_latency_s"):
            seconds = getattr(self, field)
            check(seconds is None or 0 <= seconds < 3600, field, "seconds, 0 or more", seconds)
        for field in ("copy_bytes_per_s", "select_numbers_per_s"):
            speed = getattr(self, field)
            check(speed is None or 0 < speed < math.inf, field, "a positive number", speed)
        check_count("workers_per_machine", self.workers_per_machine, "workers")
        check_count("ring_segments", self.ring_segments, "segments")
        cores = self.cores_per_worker
        check(cores is None or 0 < cores < math.inf, "cores_per_worker", "a positive number", cores)
        seconds = self.processor_s_per_byte
        check(0 <= seconds < 1, "processor_s_per_byte", "seconds, 0 or more and below 1", seconds)
        check(0 <= self.spread < 1, "spread", "0 or more and below 1", self.spread)

    @property
    def shared(self) -> float:
        """Time that a processor second of the training thread takes: above 1 where workers share cores."""
        return max(1.0, 1 / self.cores_per_worker) if self.cores_per_worker else 1.0

    @property
    def shared_beside(self) -> float:
        """Time that a processor second of other threads takes from training; 0 if they have a core."""
        if self.cores_per_worker is None:
            return 0.0
        return self.shared * min(1.0, max(0.0, 2 - self.cores_per_worker))

    def describe(self, workers: int) -> Description:
        """Describe `workers` hosts: the fastest; where there are too few, hosts are used again."""
        ranked = sorted(self.hosts, key=lambda host: (-host.speed, -host.rate_bit_per_s))
        chosen = [ranked[index % len(ranked)] for index in range(workers)]
        if self._num_sites > 1:  # rings go round inside a site first
            chosen.sort(key=lambda host: host.site)
        sites = {site: place for place, site in enumerate(dict.fromkeys(host.site for host in chosen))}
        return Description(
            hosts=tuple(
                Host(index=i, rate_bit_per_s=h.rate_bit_per_s, speed=h.speed, site=sites[h.site])
                for i, h in enumerate(chosen)
            ),
            uplink_bit_per_s=self.uplink_bit_per_s if len(sites) > 1 else None,
        )

    @property
    def _num_sites(self) -> int:
        return len({host.site for host in self.hosts})

    def in_kinds(self) -> Cluster:
        """The same cluster with nearly equal hosts made equal, so that one can be played for all of them."""
        rates = _rounded([host.rate_bit_per_s for host in self.hosts])
        speeds = _rounded([host.speed for host in self.hosts])
        each = zip(self.hosts, rates, speeds, strict=True)
        fastest = max(speeds)
        kinds = (replace(h, rate_bit_per_s=rate, speed=speed / fastest) for h, rate, speed in each)
        return replace(self, hosts=tuple(kinds))

    def summary(self) -> str:
        """The hosts in one line; those that are stated may be any number."""
        rates = sorted({host.rate_bit_per_s for host in self.in_kinds().hosts})
        words = f"{len(self.hosts)} hosts at " if len(self.hosts) > 1 else "hosts at "
        words += " and ".join(format_rate(float(f"{rate:.3g}")) for rate in rates)
        if self.uplink_bit_per_s is not None:
            words += f", {self._num_sites} sites with uplinks of {format_rate(self.uplink_bit_per_s)}"
        slow = [f"{host.name} at {host.speed:.2f}" for host in self.hosts if host.speed < 1]
        return f"{words}, slow: {', '.join(slow)}" if slow else words

    def save(self, path: Path, found: Mapping[str, Any] | None = None) -> None:
        """Write the file that `load` reads, with what else was found."""
        content = {"format": FORMAT, **asdict(self), **({"found": found} if found else {})}
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: Path) -> Cluster:
        """Read the file that `thinwire doctor` writes."""
        hint = "`thinwire doctor --out cluster.json` measures the hosts it runs on and writes one"
        try:
            content = parse_json(read_regular(path, MOST_BYTES))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", hint=hint) from None
        except ValueError:
            raise DataError(f"{path} must be a cluster file in JSON, and it is not", hint=hint) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise DataError(f"{path} must be a cluster file ({FORMAT!r}), and it is not", hint=hint)
        types = {f.name: _TYPES.get(f.name, float | None) for f in fields(Cluster)}
        own = {name: content[name] for name in types if name in content}
        for name in ("hosts", "latency_s"):
            if name not in own:
                raise DataError(f"{path} has no {name!r}", hint=hint)
        for name, value in own.items():
            if not fits(value, types[name]):
                raise DataError(f"{path}: {name} has a value that cannot be: {value!r:.80}", hint=hint)
        names = {f.name for f in fields(ClusterHost)}
        for host in own["hosts"]:
            if not {"name", "rate_bit_per_s"} <= set(host) <= names:
                raise DataError(f"{path}: a host has {', '.join(sorted(names))}, not {host!r:.80}", hint=hint)
        try:
            return Cluster(**{**own, "hosts": tuple(ClusterHost(**host) for host in own["hosts"])})
        except SettingError as error:
            raise DataError(f"{path}: {error.message}", hint=error.hint or hint) from None


_TYPES: Mapping[str, Any] = {
    "hosts": [{"name": str, "rate_bit_per_s": float, "speed": float, "site": int}],
    "measured": str,
    **dict.fromkeys(("uplink_latency_s", "processor_s_per_byte", "spread"), float),
    **dict.fromkeys(("workers_per_machine", "ring_segments"), int),
}


def _rounded(values: Sequence[float]) -> list[float]:
    """The values with those that differ by less than `SAME` from the largest of theirs made equal to their
    mean.

    >>> _rounded([100.0, 96.0, 50.0])
    [98.0, 98.0, 50.0]
    """
    order = sorted(range(len(values)), key=lambda i: -values[i])
    result, group = list(values), list[int]()
    for index in [*order, None]:
        if index is not None and (not group or values[group[0]] <= SAME * values[index]):
            group.append(index)
            continue
        mean = sum(values[i] for i in group) / len(group)
        for i in group:
            result[i] = mean
        group = [] if index is None else [index]
    return result


def stated(description: Description, *, latency_s: float, uplink_latency_s: float = 0.0) -> Cluster:
    """A cluster as its user describes it."""
    hosts = tuple(
        ClusterHost(name=f"host {h.index}", rate_bit_per_s=h.rate_bit_per_s, speed=h.speed, site=h.site)
        for h in description.hosts
    )
    return Cluster(
        hosts=hosts,
        latency_s=latency_s,
        uplink_bit_per_s=description.uplink_bit_per_s,
        uplink_latency_s=uplink_latency_s,
    )
