"""Is the lab what it says? Transfers of a known size against arithmetic; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinwire.errors import UsageError, check
from thinwire.hosts.description import Description
from thinwire.lab.job import Job
from thinwire.lab.run import run

TOLERANCE = 0.12
"""Headers cost 5 %; the rest is for start-up and timers."""
SMALLEST_MB = 1.0
REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One transfer: what it should take, and the best of what it took."""

    operation: str
    expected_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        return self.measured_s / self.expected_s

    @property
    def close(self) -> bool:
        """Within the tolerance, and not faster than the path allows."""
        return 1 - TOLERANCE <= self.ratio <= 1 + TOLERANCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """All transfers, in one lab."""

    readings: tuple[Reading, ...]
    counted_share: float
    """Bytes the interfaces counted over bytes handed to them in the all-reduces."""
    busy_share: float
    warnings: tuple[str, ...]

    @property
    def good(self) -> bool:
        return all(reading.close for reading in self.readings)


def calibrate(description: Description, *, megabytes: float = 10.0, repeats: int = REPEATS) -> Calibration:
    """Measure an exchange by pairs (over TCP alone, then over Gloo) and an all-reduce in a fresh lab."""
    check(len(description.hosts) >= 2, "hosts", "2 or more", len(description.hosts))
    check(SMALLEST_MB <= megabytes <= 1000, "megabytes", f"between {SMALLEST_MB:g} and 1000", megabytes)
    check(repeats >= 1, "repeats", "at least 1", repeats)
    num_bytes = round(megabytes * 1e6 / 4) * 4
    command = ("-m", "thinwire.lab.probe", str(num_bytes), str(repeats))
    slowest_s = expected_all_reduce_s(description, num_bytes) + 2 * expected_exchange_s(
        description, num_bytes
    )
    outcome = run(Job(description=description, command=command, time_limit_s=120 + 10 * repeats * slowest_s))
    if outcome.exit_code != 0:
        raise UsageError(f"the measurement ended with exit code {outcome.exit_code}; see the lines above")
    measured: dict[str, Any] = {}
    for report in outcome.reports:
        measured.update(report)
    exchange_s = expected_exchange_s(description, num_bytes)
    expected = {
        "exchange, TCP": exchange_s,
        "exchange, Gloo": exchange_s,
        "all-reduce, Gloo": expected_all_reduce_s(description, num_bytes),
    }
    return Calibration(
        readings=tuple(
            Reading(operation=name, expected_s=seconds, measured_s=measured[name])
            for name, seconds in expected.items()
        ),
        counted_share=measured["counted"],
        busy_share=measured["busy"],
        warnings=tuple(measured["warnings"]),
    )


def expected_exchange_s(description: Description, num_bytes: int) -> float:
    """Hosts 0 and 1, 2 and 3, ... exchange `num_bytes` at once: the slowest pair's seconds.

    >>> from thinwire.hosts.description import describe
    >>> expected_exchange_s(describe(hosts=2, rate="1gbit"), 10_000_000)
    0.08
    """
    hosts, uplink = description.hosts, description.uplink_bit_per_s
    pairs = list(zip(hosts[::2], hosts[1::2], strict=False))
    crossing = [a for a, b in pairs if a.site != b.site]
    slowest_s = 0.0
    for a, b in pairs:
        rate = min(a.rate_bit_per_s, b.rate_bit_per_s)
        if uplink is not None and a.site != b.site:
            sharing = max(sum(other.site == end.site for other in crossing) for end in (a, b))
            rate = min(rate, uplink / max(1, sharing))
        slowest_s = max(slowest_s, num_bytes * 8 / rate)
    return slowest_s


def expected_all_reduce_s(description: Description, num_bytes: int) -> float:
    """A ring in the order of hosts sends 2 (P-1)/P of `num_bytes` over every path.

    >>> from thinwire.hosts.description import describe
    >>> round(expected_all_reduce_s(describe(hosts=8, rate="200mbit"), 10_000_000), 6)
    0.7
    """
    rates = [host.rate_bit_per_s for host in description.hosts]
    if description.uplink_bit_per_s is not None:
        rates.append(description.uplink_bit_per_s)
    count = len(description.hosts)
    return 2 * (count - 1) / count * num_bytes * 8 / min(rates)
