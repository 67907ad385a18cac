"""The event files of a run: one JSONL file per worker, and a reader that follows them while they grow."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from thinwire.events import Event, Record, from_line, to_line
from thinwire.files import open_regular

FOLDER = "events"
_MOST_LINE_BYTES = 1 << 22
_MOST_FILE_BYTES = 1 << 30


class EventWriter:
    """Appends one worker's records to its file in the run folder, each flushed at once.

    If the disk refuses (full, gone), training goes on without events after one warning.
    """

    def __init__(self, run: Path, rank: int, *, clock: Callable[[], float] = time.time) -> None:
        self.path = run / FOLDER / f"worker-{rank}.jsonl"
        self._rank = rank
        self._clock = clock
        self._broken = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and _last_byte(self.path) not in (b"", b"\n")
        self._file = self.path.open("a", encoding="utf-8")
        if torn:  # an earlier process was killed in the middle of a line: do not append to it
            self._file.write("\n")

    def write(self, record: Record) -> Event:
        """Append `record` with time and rank; return the event."""
        event = Event(self._clock(), self._rank, record)
        if not self._broken:
            try:
                self._file.write(to_line(event) + "\n")
                self._file.flush()
            except OSError as error:
                self._broken = True
                warnings.warn(f"events are no longer written to {self.path}: {error}", stacklevel=2)
        return event

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # the failed flush was already warned about
            self._file.close()


def _last_byte(path: Path) -> bytes:
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        return file.read(1)


@dataclass(slots=True)
class EventReader:
    """Follows the event files of a run while they grow; `poll` returns what is new since the last call."""

    run: Path
    damage: list[str] = field(default_factory=list)
    """Lines that were damaged or of an unknown kind, by file and number, and files that were not read."""
    _places: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Bytes and lines that were read of each file."""
    _told: set[Path] = field(default_factory=set)
    """Files that could not be read."""

    def poll(self) -> list[Event]:
        """Return new events of all workers, in order of time. An unfinished last line waits for its end."""
        events: list[Event] = []
        for path in sorted((self.run / FOLDER).glob("worker-*.jsonl")):
            try:
                events += self._read(path)
            except OSError as error:
                if path not in self._told:
                    self._told.add(path)
                    self.damage.append(f"{path.name} ({error.strerror})")
        return sorted(events, key=lambda event: event.time)

    def _read(self, path: Path) -> Iterator[Event]:
        offset, number = self._places.get(path, (0, 0))
        with open_regular(path) as file:
            file.seek(offset)
            while line := file.readline(_MOST_LINE_BYTES):
                # a line that is too long comes in pieces, which are damaged
                if line[-1:] != b"\n" and len(line) < _MOST_LINE_BYTES:
                    return
                if offset > _MOST_FILE_BYTES:
                    raise OSError(errno.EFBIG, f"it has more than {_MOST_FILE_BYTES:,} bytes", str(path))
                offset, number = offset + len(line), number + 1
                self._places[path] = offset, number
                event = from_line(line) if line.strip() else None
                if event is not None:
                    yield event
                elif line.strip():
                    self.damage.append(f"{path.name} line {number:,}")


def read_events(run: Path) -> list[Event]:
    """Return all events of a run, finished or not, in order of time."""
    return EventReader(run).poll()
