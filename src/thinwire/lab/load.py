"""Watches whether the processor, not the wire, set the time; no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 0.5
FULL = 0.95
"""A window in which the processors were busier than this counts as full."""
TOLERATED = 0.2
"""Share of full windows above which measured times are doubtful."""


def read_cpu() -> tuple[float, float]:
    """Busy and total processor time since the machine started, in the kernel's ticks, over all cores."""
    with Path("/proc/stat").open() as file:
        ticks = [float(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


class LoadWatch:
    """Looks at the processors in windows; `sample` is called as often as one likes."""

    def __init__(
        self,
        *,
        read: Callable[[], tuple[float, float]] = read_cpu,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget what was seen: loading and connecting are not training."""
        self._start = self._last = self._read()
        self._due_s = self._clock() + WINDOW_S
        self.windows = 0
        self.full_windows = 0

    def sample(self) -> None:
        if self._clock() < self._due_s:
            return
        now = self._read()
        self.windows += 1
        self.full_windows += _share(self._last, now) >= FULL
        self._last = now
        self._due_s = self._clock() + WINDOW_S

    @property
    def busy_share(self) -> float:
        """Busy part of the processors' time since the start."""
        return _share(self._start, self._read())

    def warning(self) -> str | None:
        """What to tell the user, if the processor was the limit."""
        if self.windows == 0 or self.full_windows <= TOLERATED * self.windows:
            return None
        return (
            f"the processor was full {self.full_windows / self.windows:.0%} of the time: these times show "
            "this machine, not the network (fewer hosts, a lower rate, or --scale with --emulate)"
        )


def _share(before: tuple[float, float], after: tuple[float, float]) -> float:
    total = after[1] - before[1]
    return (after[0] - before[0]) / total if total > 0 else 0.0
