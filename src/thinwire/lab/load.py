"""Detects that the processor, not the network, limited the speed; no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WINDOW_S = 0.5
FULL = 0.95
"""A window with a higher load counts as full."""
TOLERATED = 0.2
"""Share of full windows above which measured times are doubtful."""


def read_cpu() -> tuple[float, float]:
    """Return busy and total processor time since boot, in kernel ticks, over all cores."""
    ticks = [float(word) for word in Path("/proc/stat").read_text().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)


class CpuLoad:
    """Measures the processor load in windows; call `sample` often."""

    def __init__(
        self,
        *,
        read: Callable[[], tuple[float, float]] = read_cpu,
        clock: Callable[[], float] = time.monotonic,
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


def _share(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[0] - before[0]) / max(after[1] - before[1], 1e-9)
