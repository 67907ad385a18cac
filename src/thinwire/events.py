"""The records of a run: one JSONL file per worker, and a reader that follows them.

A line is one record with its kind, the time and the rank:

    {"kind": "evaluated", "time": 1700000000.0, "rank": 0, "step": 23, "epoch": 1, ...}

The live view, the report and the comparison all read these same lines.
"""

from __future__ import annotations

import errno
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from thinwire.checked_json import fits, parse_json
from thinwire.files import open_regular

FOLDER = "events"
_MOST_LINE_BYTES = 1 << 22
_MOST_FILE_BYTES = 1 << 30
_END_OF_TIME = 1e11
"""Seconds since 1970; far enough, and a date all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted:
    """A worker is up and about to train."""

    kind: ClassVar[str] = "run_started"
    config: Mapping[str, object]
    versions: Mapping[str, str]
    host: str
    pid: int
    world_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One worker's progress; totals count from the start of training."""

    kind: ClassVar[str] = "progress"
    step: int
    num_steps: int
    epoch: int
    num_epochs: int
    loss: float | None
    """Mean training loss of this worker since its last progress record."""
    samples_per_s: float
    """Speed of this worker since its last progress record."""
    sent_bytes: int
    exposed_s: float
    train_s: float
    """Seconds spent training, evaluation left out."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """The strategy's instruments at this moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A test result, over all workers."""

    kind: ClassVar[str] = "evaluated"
    step: int
    epoch: int
    metric: str
    value: float | None
    loss: float | None
    train_s: float
    distance: float | None = None
    """Distance of the workers' models from their mean, relative to its size; None: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    """The totals of one worker that has finished."""

    kind: ClassVar[str] = "run_ended"
    steps: int
    rounds: int
    samples: int
    sent_bytes: int
    received_bytes: int
    messages: int
    exposed_s: float
    train_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The result of the whole run, over all workers; written by rank 0 at the end."""

    kind: ClassVar[str] = "summary"
    recipe: str
    strategy: str
    settings: Mapping[str, object]
    workers: int
    epochs: int
    steps: int
    metric: str
    value: float | None
    target: float
    reached: bool
    """Whether the value is as good as the target."""
    loss: float | None
    """Mean test loss."""
    train_s: float
    """Seconds of training, averaged over workers, evaluation left out."""
    samples_per_s: float
    """Speed of all workers together."""
    sent_bytes: int
    """Bytes sent by all workers together."""
    sent_bytes_per_step: float
    """Bytes sent by one worker, on average."""
    messages: int
    exposed_share: float
    """Share of the training time spent waiting for the wire, averaged over workers."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """The strategy's instruments at the end, averaged over workers."""
    advice: str = ""
    """The strategy's advice on a training with this number of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shrunk:
    """Neurons were removed from the model, or brought back."""

    kind: ClassVar[str] = "shrunk"
    step: int
    widths: Mapping[str, int]
    """Neurons that are left, by layer."""
    num_parameters: int
    removed: int
    """Neurons that went now."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """How many went, and why."""
    change: float = 0.0
    """Largest relative change of a layer's output on recent data, root mean square."""
    seconds: float = 0.0
    """How long training stood still for it."""
    left_alone: Mapping[str, str] = field(default_factory=dict)
    """Layers that cannot shrink, and why."""
    before: Mapping[str, int] = field(default_factory=dict)
    """Neurons before this event, by layer."""
    brought_back: int = 0
    """Neurons that the event before had removed; none goes then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A worker has failed, and why."""

    kind: ClassVar[str] = "failed"
    host: str
    error: str
    """The class of the error."""
    message: str
    hint: str = ""
    expected: bool = True
    """Whether thinwire raised the error on purpose; else the log holds a traceback."""
    consequence: bool = False
    """Whether the error follows from another worker's failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimed:
    """One block of a benchmark: a few timed steps of one system; numbers are per step and worker.

    A system that cannot run has one record per cell, with the reason in `unavailable` and no numbers.
    """

    kind: ClassVar[str] = "step_timed"
    system: str
    family: Literal["ceiling", "ours", "rival"]
    workers: int
    rate_bits_per_s: float | None
    """Bandwidth of every host's path; None over loopback, where no rate applies."""
    net: str
    """The network that was trained, as given on the command line."""
    turn: int
    """Blocks of one turn followed each other closely: ratios are taken within a turn."""
    step_s: float | None = None
    """Wall time of the slowest worker."""
    compute_s: float
    """Theoretical time of forward and backward without communication."""
    exposed_s: float | None = None
    """Time spent waiting for the wire, mean over workers; None if the system does not report it."""
    processor_s: float | None = None
    """CPU time of all threads of a worker, mean over workers."""
    sent_bytes: float | None = None
    """Counted by the hosts' interfaces, mean over workers; over loopback the strategy's count, or None."""
    messages: float | None = None
    """None if the system does not report it."""
    emulated: bool
    """Whether compute was emulated: layers that wait as long as an accelerator would take."""
    unavailable: str | None = None
    """Why this system could not run here ("not installed: ..."); None if it did."""
    metered_bytes: float | None = None
    """Bytes that a strategy handed to the wire, beside what the interfaces counted."""
    processor_full: bool = False
    """Whether the processors of this machine, not the wire, limited the speed."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """The strategy's instruments at the end of the block, mean over workers."""


Record = RunStarted | Progress | Evaluated | RunEnded | Summary | Shrunk | Failed | StepTimed
KINDS: Mapping[str, type[Record]] = {cls.kind: cls for cls in get_args(Record)}
_TYPES: Mapping[type[Record], Mapping[str, Any]] = {
    cls: {field.name: hints[field.name] for field in fields(cls)}
    for cls, hints in ((cls, get_type_hints(cls)) for cls in KINDS.values())
}
"""Of the fields of each kind."""


@dataclass(frozen=True, slots=True)
class Event:
    """A record with its time (seconds since 1970) and the rank of the worker it came from."""

    time: float
    rank: int
    record: Record


def plain(record: Record) -> dict[str, object]:
    """Return the fields of a record as strict JSON can hold them: NaN and infinity become None."""
    strict: dict[str, object] = json.loads(
        json.dumps(asdict(record), default=str), parse_constant=lambda number: None
    )
    return strict


def to_line(event: Event) -> str:
    """Encode an event as one line of JSON, without its newline."""
    head = {"kind": event.record.kind, "time": event.time, "rank": event.rank}
    return json.dumps({**head, **plain(event.record)}, allow_nan=False)


def from_line(line: bytes) -> Event | None:
    """Decode a line; None if it is damaged or of a kind this version does not know.

    Every field is of its type, or the line counts as damaged: whoever reads events need not ask again.
    Unknown fields are ignored, so newer files stay readable.
    """
    try:
        data = parse_json(line)
        cls = KINDS[data["kind"]]
        types = _TYPES[cls]
        known = {name: value for name, value in data.items() if name in types}
        if not (fits(data["time"], float) and 0 <= data["time"] < _END_OF_TIME and fits(data["rank"], int)):
            return None
        if not all(fits(value, types[name]) for name, value in known.items()):
            return None
        return Event(float(data["time"]), data["rank"], cls(**known))
    except (ValueError, KeyError, TypeError):
        return None


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
