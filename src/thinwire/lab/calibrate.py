"""Whether times in the lab show its network: transfers against arithmetic, processor load; no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import UsageError, check
from thinwire.hosts.description import Description
from thinwire.lab.run import Job, run
from thinwire.simulate.network import Network
from thinwire.traffic import Round

TOLERANCE = 0.12
"""Headers cost 5 %; the rest is for start-up and timers."""
WINDOW_S = 0.5
FULL = 0.95
"""A window with a higher load counts as full."""
TOLERATED = 0.2
"""Share of full windows above which measured times are doubtful."""

Ticks = tuple[float, float]
"""Busy and total processor time, as the kernel counts it."""


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


def calibrate(description: Description, *, megabytes: float = 10.0, repeats: int = 3) -> Calibration:
    """Measure an exchange by pairs (over plain TCP, then over Gloo) and an all-reduce in a new lab."""
    check(len(description.hosts) >= 2, "hosts", "2 or more", len(description.hosts))
    check(1 <= megabytes <= 1000, "megabytes", "between 1 and 1000", megabytes)
    check(repeats >= 1, "repeats", "at least 1", repeats)
    num_bytes = round(megabytes * 1e6 / 4) * 4
    expected = expected_s(description, num_bytes)
    command = ("-m", "thinwire.lab.probe", str(num_bytes), str(repeats))
    time_limit_s = 120 + 10 * repeats * sum(expected.values())
    result = run(Job(description=description, command=command, time_limit_s=time_limit_s))
    if result.exit_code != 0:
        raise UsageError(f"the measurement ended with exit code {result.exit_code}; see the lines above")
    (measured,) = result.reports
    return Calibration(
        readings=tuple(
            Reading(operation=name, expected_s=seconds, measured_s=measured[name])
            for name, seconds in expected.items()
        ),
        counted_share=measured["counted"],
        busy_share=result.busy_share,
        warnings=result.warnings,
    )


def expected_s(description: Description, num_bytes: int) -> dict[str, float]:
    """Return the seconds of each operation by arithmetic.

    Hosts 0 and 1, 2 and 3, ... exchange `num_bytes` at once, and the slowest pair counts; the all-reduce is a
    ring in the order of hosts, with 2 (P-1)/P of `num_bytes` on every path.

    >>> from thinwire.hosts.description import describe
    >>> expected_s(describe(hosts=4, rate="1gbit"), 10_000_000)
    {'exchange, TCP': 0.08, 'exchange, Gloo': 0.08, 'all-reduce, Gloo': 0.12}
    """
    network, hosts = Network(description), range(len(description.hosts))
    all_reduce_s = network.collective(Round(op="all_reduce", send_bytes=num_bytes), hosts, 0.0)
    network.rest()
    paired = hosts[: len(hosts) // 2 * 2]
    exchange_s = max(network.transfer(host, host ^ 1, num_bytes, 0.0)[1] for host in paired)
    return {"exchange, TCP": exchange_s, "exchange, Gloo": exchange_s, "all-reduce, Gloo": all_reduce_s}


def read_cpu() -> Ticks:
    """Read the processor time since boot, over all cores.

    What others do at a low priority (nice) gives way to a lab at the usual one, and counts as idle there.
    """
    ticks = [float(word) for word in Path("/proc/stat").read_text().split()[1:9]]
    idle = ticks[3] + ticks[4] + (ticks[1] if os.nice(0) == 0 else 0.0)
    return sum(ticks) - idle, sum(ticks)


class CpuLoad:
    """Measures the processor load in windows; call `sample` often."""

    def __init__(
        self, *, read: Callable[[], Ticks] = read_cpu, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._clock = read, clock
        self.restart()

    def restart(self) -> None:
        """Discard all samples: loading and connecting are not training."""
        self._start = self._last = self._read()
        self._due_s = self._clock() + WINDOW_S
        self._windows = self._full_windows = 0

    def sample(self) -> None:
        if self._clock() < self._due_s:
            return
        now = self._read()
        self._windows += 1
        self._full_windows += _share(self._last, now) >= FULL
        self._last = now
        self._due_s = self._clock() + WINDOW_S

    @property
    def busy_share(self) -> float:
        """Busy share of the processors' time since the last restart."""
        return _share(self._start, self._read())

    def warning(self) -> str | None:
        """Return a warning for the user if the processor was the limit."""
        if self._full_windows <= TOLERATED * self._windows:
            return None
        return (
            f"the processor was full {self._full_windows / self._windows:.0%} of the time: these times show "
            "this machine, not the network (fewer hosts, a lower rate, or --scale with --emulate)"
        )


def _share(before: Ticks, after: Ticks) -> float:
    return (after[0] - before[0]) / max(after[1] - before[1], 1e-9)
