"""What to run in a lab, and what came of it: values that travel between the two sides; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import check
from thinwire.hosts.description import Description
from thinwire.lab.network import Counters

MOST_HOSTS = 254
"""Addresses in the lab's one subnet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One command, started once per host."""

    description: Description
    command: tuple[str, ...]
    """`train.py ...` or `-m package ...` run in Python; anything else is a program."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set for every worker, beside what the lab sets itself."""
    time_limit_s: float | None = None
    grace_s: float = 5.0
    """After the first failure the others have this long to say what they think of it."""
    keep_going: bool = False
    """Let the others run to their end after a failure."""
    prefix: bool = True
    """Begin every line of output with the host it came from."""

    def __post_init__(self) -> None:
        count = len(self.description.hosts)
        check(count <= MOST_HOSTS, "hosts", f"1 to {MOST_HOSTS}, one address each", count)
        check(bool(self.command), "command", "given", "", hint="thinwire lab run --hosts 4 -- train.py")
        if self.is_python and self.command[0] == "-m":
            check(len(self.command) > 1, "command", "given a module after -m", "-m")
        elif self.is_python:
            script = self.command[0]
            check(Path(script).is_file(), "command", "a script that exists", script)
        check(self.time_limit_s is None or self.time_limit_s > 0, "time limit", "above 0", self.time_limit_s)
        check(self.grace_s >= 0, "grace", "0 or more", self.grace_s)

    @property
    def is_python(self) -> bool:
        """Whether the workers can be forked from one process that has torch loaded already."""
        return self.command[0] == "-m" or self.command[0].endswith(".py")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnd:
    """How the worker of one host ended."""

    host: int
    exit_code: int
    """As a shell says it: 128 + signal when killed."""
    steps: int
    scheduled: bool
    """Killed by a fault of the schedule, which is no failure."""
    starts: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The end of a run."""

    exit_code: int
    """0, or that of the first failure; 124 when the time limit was reached."""
    seconds: float
    workers: tuple[WorkerEnd, ...]
    counters: tuple[Counters, ...]
    faults: tuple[str, ...]
    """What happened when, in words."""
    warnings: tuple[str, ...]
    busy_share: float
    """How much of the processors' time was used while the workers trained."""
    reports: tuple[Any, ...] = ()
    """What workers reported through `Control.report`, in order."""
