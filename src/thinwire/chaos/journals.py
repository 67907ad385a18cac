"""Reads what workers wrote down: who trained on what in which generation, and whom each missed when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Line:
    """One thing a worker noted."""

    at: float
    """Seconds since 1970."""
    what: str
    facts: dict[str, Any]


@dataclass(slots=True)
class WorkerJournal:
    """One process, from its first word to its last."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    _read: int = 0
    _rest: bytes = b""

    def poll(self) -> list[Line]:
        """What it has written since; a line that a kill has cut off is left out."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        new = []
        for text in whole:
            facts = json.loads(text)
            new.append(Line(facts.pop("at"), facts.pop("what"), facts))
        self.lines += new
        return new

    def of(self, what: str) -> Iterator[Line]:
        return (line for line in self.lines if line.what == what)

    @property
    def host(self) -> int:
        """The number of the worker that was started; one started again has the same."""
        first = next(self.of("member"), None)
        return -1 if first is None else int(first.facts["rank"] or 0)

    @property
    def address(self) -> str:
        """host:port, to join by."""
        first = next(self.of("member"))
        return f"{first.facts['host']}:{first.facts['port']}"

    @property
    def pid(self) -> int:
        first = next(self.of("member"), None)
        return -1 if first is None else int(first.facts["pid"])

    @property
    def ids(self) -> set[str]:
        """As which members it has been known."""
        found = {line.facts["id"] for line in self.of("member")}
        return found | {line.facts["me"] for line in self.of("adopted")}

    @property
    def ended(self) -> Line | None:
        return next(self.of("ended"), None)

    @property
    def steps(self) -> int:
        return sum(1 for _ in self.of("done"))


class Journals:
    """All workers of a run, as files in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, WorkerJournal] = {}

    def poll(self) -> None:
        for path in sorted(self._folder.glob("*.jsonl")):
            self._known.setdefault(path, WorkerJournal(path)).poll()

    @property
    def workers(self) -> list[WorkerJournal]:
        return list(self._known.values())

    def of_host(self, host: int) -> list[WorkerJournal]:
        """Processes that were started there, in order of time."""
        mine = [each for each in self._known.values() if each.lines and each.host == host]
        return sorted(mine, key=lambda each: each.lines[0].at)
