"""What this machine has room for: cores, free memory and open files; no torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thinwire.errors import check

WORKER_BYTES = 300_000_000
"""Memory of one worker process: torch alone takes most of it."""
WORKERS_PER_CORE = 16
"""Importing torch takes a core some seconds per worker: more of them take minutes to start."""
MOST_PROCESSES = 1_024
"""Worker processes on one machine, insisted or not."""
KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Environment for workers that compute on a processor: the C library keeps what a step has freed for the
next. Else it gives large tensors back to the system in every step, or not, as the heap happens to lie, and
new pages took up to half of a step (digits-wide: 26 ms of the processor, 14 with this)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The part of a machine that is left for this process and its children."""

    cores: int
    free_bytes: float

    @staticmethod
    def this() -> Machine:
        return Machine(cores=num_cores(), free_bytes=min(_free_bytes(), default=float("inf")))

    def check_workers(self, count: int, *, insist: bool = False) -> None:
        """Refuse more worker processes than fit, or with `insist` than any machine starts."""
        by_memory = max(1, int(min(self.free_bytes / WORKER_BYTES, MOST_PROCESSES)))
        most = MOST_PROCESSES if insist else min(by_memory, WORKERS_PER_CORE * self.cores, MOST_PROCESSES)
        why = f"{self.cores} cores, {self.free_bytes / 1e9:.3g} GB free"
        rule = f"at most {most:,}" if most == MOST_PROCESSES else f"at most {most:,} on this machine ({why})"
        insisting = "" if insist or count > MOST_PROCESSES else "--oversubscribe to start them anyway, "
        hint = f"fewer workers, {insisting}or `thinwire simulate`, which plays thousands in one process"
        check(count <= most, "workers", rule, count, hint=hint)

    def check_memory(self, num_bytes: float, field: str, value: object, *, hint: str) -> None:
        """Refuse what needs more memory than is free."""
        rule = f"of a size that fits: it needs {num_bytes / 1e9:,.1f} GB of {self.free_bytes / 1e9:,.1f} free"
        check(num_bytes <= self.free_bytes, field, rule, value, hint=hint)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_open_files(needed: int, field: str, value: object) -> None:
    """Refuse what needs more open files than this process may ever have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    rule = f"fewer: it takes {needed:,} open files, and this process may have {most:,}"
    check(most == resource.RLIM_INFINITY or needed <= most, field, rule, value, hint="raise `ulimit -Hn`")


def raise_open_files() -> None:
    """Let this process and its children open as many files as the system allows them."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _free_bytes(root: Path = Path("/")) -> Iterator[float]:
    """The limits on memory that are known here: the machine's, and that of a container."""
    with suppress(OSError, KeyError, ValueError):
        yield 1024 * _numbers(root / "proc/meminfo")["MemAvailable:"]
    group = root / "sys/fs/cgroup"
    with suppress(OSError, KeyError, ValueError):
        used = float((group / "memory.current").read_text()) - _numbers(group / "memory.stat")["file"]
        yield float((group / "memory.max").read_text()) - used  # "max" is no number: there is no limit


def _numbers(file: Path) -> dict[str, float]:
    return {words[0]: float(words[1]) for words in map(str.split, file.read_text().splitlines())}
