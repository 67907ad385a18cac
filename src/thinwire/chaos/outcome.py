"""What a run under faults came to, however its workers were started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.chaos.journals import Journals
from thinwire.hosts.description import Fault


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was applied, or its end."""

    at: float
    """Seconds since 1970."""
    fault: Fault
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended."""

    host: int
    code: int | None
    """As a shell reports it; None: it had to be ended when the time was up."""
    planned: bool
    """Whether a fault has killed it."""


@dataclass(slots=True)
class Outcome:
    """Everything that the report is made of."""

    folder: Path
    """With the output of all workers."""
    journals: Journals
    began: float
    struck: list[Struck] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    not_reached: Sequence[Fault] = ()
    seconds: float = 0.0
    sites: dict[int, list[int]] = field(default_factory=dict)
    """Hosts by site, where there are several."""

    def victims(self, fault: Fault) -> list[int]:
        """The hosts it happens to."""
        return [fault.host] if fault.host is not None else self.sites.get(fault.site or 0, [])
