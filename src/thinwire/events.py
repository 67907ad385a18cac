"""What a run says about itself: small records, one JSONL file per worker, and a reader that follows them.

A line is one record with its kind, the time and the rank:

    {"kind": "evaluated", "time": 1700000000.0, "rank": 0, "step": 23, "epoch": 1, ...}

The live view, the report and the comparison all read these same lines.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal

FOLDER = "events"


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
    """Where one worker stands; totals count from the start of training."""

    kind: ClassVar[str] = "progress"
    step: int
    num_steps: int
    epoch: int
    num_epochs: int
    loss: float | None
    """Mean training loss of this worker since its last progress record."""
    samples_per_s: float
    """Of this worker, since its last progress record."""
    sent_bytes: int
    exposed_s: float
    train_s: float
    """Seconds spent training, evaluation left out."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """What the strategy tells of itself at this moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The test set was gone through; values are over all workers."""

    kind: ClassVar[str] = "evaluated"
    step: int
    epoch: int
    metric: str
    value: float | None
    loss: float | None
    train_s: float
    distance: float | None = None
    """Of the workers' models from their mean, relative to its size; None where it was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnded:
    """A worker came to the end; the numbers are its own."""

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
    """Of all workers together."""
    sent_bytes: int
    """By all workers together."""
    sent_bytes_per_step: float
    """By one worker, on average."""
    messages: int
    exposed_share: float
    """Part of the training time spent waiting for the wire, averaged over workers."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """What the strategy tells of itself at the end, averaged over workers."""
    caution: str = ""
    """What the strategy has to say of a training with so many steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A worker gives up, and why."""

    kind: ClassVar[str] = "failed"
    host: str
    error: str
    """The class of the error."""
    message: str
    hint: str = ""
    expected: bool = True
    """Whether it is an error thinwire raises on purpose; else the log holds a traceback."""
    consequence: bool = False
    """Whether it only follows from another worker's failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimed:
    """One block of a benchmark: a few steps of one system, timed; numbers are per step and worker.

    A system that cannot run has one record per cell, with the reason in `unavailable` and no numbers.
    """

    kind: ClassVar[str] = "step_timed"
    system: str
    family: Literal["ceiling", "ours", "rival"]
    workers: int
    rate_bits_per_s: float | None
    """Bandwidth of every host's path; None over loopback, where no rate applies."""
    net: str
    """What was trained, in the words it was asked for with."""
    turn: int
    """Blocks of the same turn followed each other closely: ratios are taken within a turn."""
    step_s: float | None
    """By the clock of the slowest worker."""
    compute_s: float
    """Forward and backward without any communication, in theory."""
    exposed_s: float | None
    """Waiting for the wire, mean over workers; None where a system does not tell."""
    processor_s: float | None
    """Of all threads of a worker, mean over workers."""
    sent_bytes: float | None
    """Counted by the hosts' interfaces, mean over workers; over loopback what a strategy says, or None."""
    messages: float | None
    """None where a system does not tell."""
    emulated: bool
    """Whether compute was emulated: layers that wait as long as an accelerator would take."""
    unavailable: str | None
    """Why this system could not run here ("not installed: ..."); None if it did."""
    metered_bytes: float | None = None
    """What a strategy says it handed to the wire, beside what the interfaces counted."""
    processor_full: bool = False
    """Whether the processors of this machine, not the wire, set the time."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """What a strategy tells of itself at the end of the block, mean over workers."""


Record = RunStarted | Progress | Evaluated | RunEnded | Summary | Failed | StepTimed
KINDS: Mapping[str, type[Record]] = {
    cls.kind: cls for cls in (RunStarted, Progress, Evaluated, RunEnded, Summary, Failed, StepTimed)
}


@dataclass(frozen=True, slots=True)
class Event:
    """A record with its time (seconds since 1970) and the rank of the worker it came from."""

    time: float
    rank: int
    record: Record


def plain(record: Record) -> dict[str, object]:
    """The fields of a record as strict JSON can hold them: NaN and infinity become None."""
    return {key: _finite(value) for key, value in asdict(record).items()}


def to_line(event: Event) -> str:
    """One line of JSON, without its newline."""
    head = {"kind": event.record.kind, "time": event.time, "rank": event.rank}
    return json.dumps({**head, **plain(event.record)}, allow_nan=False, default=str)


def from_line(line: str) -> Event | None:
    """The event of a line; None if it is damaged or of a kind this version does not know.

    Fields that this version does not know are left out, so newer files stay readable.
    """
    try:
        data = json.loads(line)
        cls = KINDS[data["kind"]]
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data or _needed(f)}
        return Event(float(data["time"]), int(data["rank"]), cls(**known))
    except (ValueError, KeyError, TypeError):
        return None


def _needed(each: Field[object]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


class EventWriter:
    """Appends one worker's records to its file in the run folder, each flushed at once.

    A write is some 20 microseconds into the page cache. If the disk refuses (full, gone), training goes
    on without its diary and one warning says so.
    """

    def __init__(self, run: Path, rank: int, *, clock: Callable[[], float] = time.time) -> None:
        self.path = run / FOLDER / f"worker-{rank}.jsonl"
        self._rank = rank
        self._clock = clock
        self._broken = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_torn(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if torn:  # a predecessor was killed in the middle of a line: do not glue ours to it
            self._file.write("\n")

    def write(self, record: Record) -> Event:
        """Stamp and append `record`; return it as the readers will see it."""
        event = Event(self._clock(), self._rank, record)
        if not self._broken:
            try:
                self._file.write(to_line(event) + "\n")
                self._file.flush()
            except OSError as error:
                self._broken = True
                warnings.warn(f"events are no longer written to {self.path}: {error}", stacklevel=2)
        return event

    def close(self) -> None:
        """Close the file; closing twice does no harm."""
        try:
            self._file.close()
        except OSError:  # what could not be flushed was already warned about
            pass

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


@dataclass(slots=True)
class EventReader:
    """Follows the event files of a run while they grow; `poll` returns what is new since the last call."""

    run: Path
    skipped: int = 0
    """Whole lines that were damaged or of an unknown kind."""
    _offsets: dict[Path, int] = field(default_factory=dict)

    def poll(self) -> list[Event]:
        """New events of all workers, in order of time. An unfinished last line waits for its end."""
        events: list[Event] = []
        for path in sorted((self.run / FOLDER).glob("worker-*.jsonl")):
            events.extend(self._parse(self._new_lines(path)))
        return sorted(events, key=lambda event: event.time)

    def _new_lines(self, path: Path) -> list[str]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            chunk = file.read()
        end = chunk.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + end
        return chunk[:end].decode("utf-8", errors="replace").splitlines()

    def _parse(self, lines: Iterable[str]) -> Iterable[Event]:
        for line in filter(str.strip, lines):
            event = from_line(line)
            if event is None:
                self.skipped += 1
            else:
                yield event


def read_events(run: Path) -> list[Event]:
    """All events of a run, finished or not, in order of time."""
    return EventReader(run).poll()
