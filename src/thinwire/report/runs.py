"""One run with its workers, as its events record it, and the numbers that tables and plots show."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from thinwire.checked_json import fits, fitting, parse_json
from thinwire.events import Evaluated, Event, Failed, Progress, RunEnded, RunStarted, Shrunk, Summary
from thinwire.files import read_regular
from thinwire.timings import Family

State = Literal["finished", "failed", "unfinished"]
Point = tuple[float, float]
Step = TypeVar("Step", Progress, Evaluated)
MOST_JSON_BYTES = 1 << 26
CONFIG = {"settings": Mapping[str, object], "workers": int}
FACTS = {"config": Mapping[str, object], "versions": Mapping[str, object], "cores": int}
"""Entries of a run's config.json that are read, with their types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """One worker of a run; totals are those of its last event."""

    rank: int
    host: str
    progress: tuple[Progress, ...] = ()
    steps: int = 0
    samples: float = 0.0
    train_s: float = 0.0
    """Seconds of training, without evaluation."""
    exposed_s: float = 0.0
    """Seconds of training spent waiting for the wire."""
    sent_bytes: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds of training spent on anything but waiting."""
        return max(self.train_s - self.exposed_s, 0.0)

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.train_s if self.train_s > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        return self.samples / max(self.train_s, 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run folder with all its workers, and its name among the other runs of a page."""

    folder: Path
    facts: Mapping[str, Any]
    """The content of config.json: config, versions, host, cores, command, created."""
    config: Mapping[str, Any]
    recipe: str
    strategy: str
    """The name, without settings."""
    settings: Mapping[str, Any]
    seconds: str
    """The unit of its clock."""
    versions: Mapping[str, str]
    world_size: int
    workers: tuple[WorkerRecord, ...]
    num_steps: int
    """Planned number of steps, 0 if unknown."""
    steps: int
    """Steps of the furthest worker."""
    train_s: float
    """Seconds of training, mean over workers."""
    samples_per_s: float
    """Samples per second of all workers together."""
    instruments: Mapping[str, float]
    """The strategy's instruments at the end, mean over workers."""
    evaluated: tuple[Evaluated, ...]
    shrunk: tuple[Shrunk, ...]
    """Removals by apoptosis."""
    summary: Summary | None
    failures: tuple[tuple[Event, Failed], ...]
    """Causes first, then their consequences."""
    state: State
    starts: int
    """1 plus the number of times it was resumed."""
    last_time: float
    """Time of the newest event, in seconds since 1970."""
    aim: float | None = None
    """The target of a benchmark, instead of the recipe's."""
    system: str = ""
    """The strategy, with the settings in which it differs from other runs: `all-reduce:overlap=forward`."""
    family: Family = "ours"
    label: str = ""
    """The system, and the settings in which this run differs from others of the same system."""

    @property
    def exposed_share(self) -> float | None:
        """The exposed part of the training time, mean over workers; rivals do not tell."""
        return None if self.family == "rival" else _mean(worker.exposed_share for worker in self.workers)

    def per_step(self, field: Literal["train_s", "exposed_s", "sent_bytes"]) -> float:
        """A total of the workers, per step, mean over workers."""
        return _mean(getattr(worker, field) / worker.steps for worker in self.workers if worker.steps)

    def losses(self) -> list[Point]:
        """Training loss against seconds of training, mean over workers."""
        points = [[(p.train_s, p.loss) for p in w.progress if p.loss is not None] for w in self.workers]
        curves = [curve for curve in points if curve]
        return [
            # of each worker the newest loss; those that have not begun are left out
            (at_s, _mean(curve[i - 1][1] for curve in curves if (i := bisect_right(curve, (at_s, math.inf)))))
            for at_s, _ in (curves or [[]])[0]
        ]

    def values(self, against: Literal["train_s", "epoch"] = "train_s") -> list[Point]:
        """The metric on the test data against seconds of training or epochs."""
        return [(getattr(e, against), e.value) for e in self.evaluated if e.value is not None]

    def distances(self) -> list[Point]:
        """The distance of replicas from their mean against epochs, where it was measured."""
        return [(e.epoch, e.distance) for e in self.evaluated if e.distance is not None]

    def widths(self) -> dict[str, list[Point]]:
        """Neurons of every layer that has shrunk against epochs, from the beginning to the last epoch."""
        per_epoch = next((e.step / e.epoch for e in reversed(self.evaluated) if e.epoch and e.step), 0.0)
        if not per_epoch or not self.shrunk:
            return {}
        found: dict[str, list[Point]] = {}
        for event in self.shrunk:
            for name, width in event.widths.items():
                if name not in event.left_alone:
                    start = [(0.0, float(event.before.get(name, width)))]
                    found.setdefault(name, start).append((event.step / per_epoch, width))
        return {name: [*curve, (self.steps / per_epoch, curve[-1][1])] for name, curve in found.items()}


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def make_run(folder: Path, events: Sequence[Event]) -> Run | None:
    """The run recorded by these events; None if they record none."""
    starts = [(event.rank, event.record) for event in events if isinstance(event.record, RunStarted)]
    failed = [(event, event.record) for event in events if isinstance(event.record, Failed)]
    evaluated = [event.record for event in events if isinstance(event.record, Evaluated)]
    summary = next((e.record for e in reversed(events) if isinstance(e.record, Summary)), None)
    workers = _workers(events)
    if not workers and not evaluated and summary is None:
        return None
    facts = read_json(folder / "config.json", FACTS)
    world_size = len(workers)
    config, versions = facts.get("config", {}), facts.get("versions", {})
    if starts:
        _, started = starts[-1]
        world_size, config, versions = started.world_size, started.config, started.versions
    elif summary is not None:
        names = ("recipe", "strategy", "settings", "workers")
        world_size, config = summary.workers, {**{name: getattr(summary, name) for name in names}, **config}
    config = fitting(config, CONFIG)
    workers = [worker for worker in workers if worker.rank < world_size]
    return Run(
        folder=folder,
        facts=facts,
        config=config,
        recipe=str(config.get("recipe", "unknown")),
        strategy=str(config.get("strategy", "unknown")),
        settings=dict(config.get("settings") or {}),
        seconds="virtual seconds" if config.get("clock") == "virtual" else "seconds",
        versions=versions,
        world_size=world_size,
        workers=tuple(workers),
        num_steps=max((w.progress[-1].num_steps for w in workers if w.progress), default=0),
        steps=max((w.steps for w in workers), default=0),
        train_s=_mean(w.train_s for w in workers),
        samples_per_s=_mean(w.samples_per_s for w in workers) * world_size,
        instruments={} if summary is None else summary.instruments,
        evaluated=tuple(_without_repeated(evaluated)),
        shrunk=tuple(event.record for event in events if isinstance(event.record, Shrunk)),
        summary=summary,
        failures=tuple(sorted(failed, key=lambda pair: (pair[1].consequence, pair[0].time))),
        state=_state(events),
        starts=max(Counter(rank for rank, _ in starts).values(), default=1),
        last_time=max(event.time for event in events),
    )


def _workers(events: Sequence[Event]) -> list[WorkerRecord]:
    hosts = {e.rank: e.record.host for e in events if isinstance(e.record, RunStarted | Failed)}
    progress: dict[int, list[Progress]] = {}
    ended: dict[int, RunEnded] = {}
    for event in events:
        if isinstance(event.record, Progress):
            progress.setdefault(event.rank, []).append(event.record)
            ended.pop(event.rank, None)  # it was resumed
        elif isinstance(event.record, RunEnded):
            ended[event.rank] = event.record
    return [
        _worker(rank, hosts.get(rank, "unknown"), _without_repeated(progress.get(rank, [])), ended.get(rank))
        for rank in sorted({*hosts, *progress, *ended})
    ]


def _worker(rank: int, host: str, progress: list[Progress], ended: RunEnded | None) -> WorkerRecord:
    if not progress and ended is None:
        return WorkerRecord(rank=rank, host=host)
    last = ended or progress[-1]
    spans = pairwise([0.0, *(each.train_s for each in progress)])
    done = sum(each.samples_per_s * (end - begin) for each, (begin, end) in zip(progress, spans, strict=True))
    return WorkerRecord(
        rank=rank,
        host=host,
        progress=tuple(progress),
        steps=last.steps if isinstance(last, RunEnded) else last.step,
        samples=last.samples if isinstance(last, RunEnded) else done,
        train_s=last.train_s,
        exposed_s=last.exposed_s,
        sent_bytes=last.sent_bytes,
    )


def _without_repeated(records: Sequence[Step]) -> list[Step]:
    """The records without the steps that a resumed run repeated."""
    kept: list[Step] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def _state(events: Sequence[Event]) -> State:
    """The state of the newest attempt: a worker's start outdates its earlier events."""
    states: dict[type, State] = {RunStarted: "unfinished", Failed: "failed", Summary: "finished"}
    newest = {event.rank: states[type(event.record)] for event in events if type(event.record) in states}
    return next((state for state in ("failed", "finished") if state in newest.values()), "unfinished")


def read_json(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """The object in a JSON file, without entries of other types; empty if it is absent or damaged."""
    content = _parsed(path)
    return fitting(content, types) if isinstance(content, dict) else {}


def read_list(path: Path, types: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects in the list of a JSON file, without those of other types."""
    content = _parsed(path)
    return [each for each in content if fits(each, types)] if isinstance(content, list) else []


def _parsed(path: Path) -> Any:
    try:
        return parse_json(read_regular(path, MOST_JSON_BYTES))
    except (OSError, ValueError):
        return None
