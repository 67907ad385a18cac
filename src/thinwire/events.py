"""What a run says of itself: kinds of records, and each as one line of JSON.

A line is one record with its kind, the time and the rank:

    {"kind": "evaluated", "time": 1700000000.0, "rank": 0, "step": 23, "epoch": 1, ...}

The live view, the report and the comparison all read these same lines (`event_log.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from thinwire.checked_json import fits, parse_json

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
"""The types of the fields of each kind."""


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
