"""Checks the lab: compares transfers of a known size with arithmetic; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinwire.errors import UsageError, check
from thinwire.hosts.description import Description
from thinwire.lab.run import Job, run
from thinwire.simulate.network import Network
from thinwire.traffic import Round

TOLERANCE = 0.12
"""Headers cost 5 %; the rest is for start-up and timers."""
MIN_MB = 1.0
REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The expected and the shortest measured time of one kind of transfer."""

    operation: str
    expected_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        return self.measured_s / self.expected_s

    @property
    def close(self) -> bool:
        """Whether it is within the tolerance, and not faster than the path allows."""
        return 1 - TOLERANCE <= self.ratio <= 1 + TOLERANCE


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """All transfers in one lab."""

    readings: tuple[Reading, ...]
    counted_share: float
    """Bytes counted by the interfaces over bytes sent in the all-reduces."""
    busy_share: float
    warnings: tuple[str, ...]

    @property
    def good(self) -> bool:
        return all(reading.close for reading in self.readings)


def calibrate(description: Description, *, megabytes: float = 10.0, repeats: int = REPEATS) -> Calibration:
    """Measure an exchange by pairs (over plain TCP, then over Gloo) and an all-reduce in a new lab."""
    check(len(description.hosts) >= 2, "hosts", "2 or more", len(description.hosts))
    check(MIN_MB <= megabytes <= 1000, "megabytes", f"between {MIN_MB:g} and 1000", megabytes)
    check(repeats >= 1, "repeats", "at least 1", repeats)
    num_bytes = round(megabytes * 1e6 / 4) * 4
    exchanges = ("exchange, TCP", "exchange, Gloo")
    expected = dict.fromkeys(exchanges, expected_exchange_s(description, num_bytes))
    expected["all-reduce, Gloo"] = expected_all_reduce_s(description, num_bytes)
    command = ("-m", "thinwire.lab.probe", str(num_bytes), str(repeats))
    time_limit_s = 120 + 10 * repeats * sum(expected.values())
    result = run(Job(description=description, command=command, time_limit_s=time_limit_s))
    if result.exit_code != 0:
        raise UsageError(f"the measurement ended with exit code {result.exit_code}; see the lines above")
    measured: dict[str, Any] = result.reports[0]
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
    """Return the seconds of the slowest pair when hosts 0 and 1, 2 and 3, ... exchange `num_bytes` at once.

    >>> from thinwire.hosts.description import describe
    >>> expected_exchange_s(describe(hosts=2, rate="1gbit"), 10_000_000)
    0.08
    """
    network, paired = Network(description), len(description.hosts) // 2 * 2
    return max(network.transfer(host, host ^ 1, num_bytes, 0.0)[1] for host in range(paired))


def expected_all_reduce_s(description: Description, num_bytes: int) -> float:
    """Return the seconds of a ring in the order of hosts, with 2 (P-1)/P of `num_bytes` on every path."""
    hosts = range(len(description.hosts))
    return Network(description).collective(Round(op="all_reduce", send_bytes=num_bytes), hosts, 0.0)
