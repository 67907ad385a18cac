"""One run as its events tell it: finished, failed, or still going on; no torch."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from thinwire.events import (
    Evaluated,
    Event,
    EventReader,
    Failed,
    Progress,
    RunEnded,
    RunStarted,
    Summary,
)

CONFIG = "config.json"

State = Literal["finished", "failed", "unfinished"]
Point = tuple[float, float]
Step = TypeVar("Step", Progress, Evaluated)


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """What one worker said; totals are those of its last word."""

    rank: int
    host: str
    progress: tuple[Progress, ...]
    ended: RunEnded | None

    @property
    def _last(self) -> Progress | RunEnded | None:
        return self.ended or (self.progress[-1] if self.progress else None)

    @property
    def steps(self) -> int:
        """Steps done."""
        if self.ended is not None:
            return self.ended.steps
        return self.progress[-1].step if self.progress else 0

    @property
    def train_s(self) -> float:
        """Seconds of training, evaluation left out."""
        return self._last.train_s if self._last else 0.0

    @property
    def exposed_s(self) -> float:
        """Of these, seconds of waiting for the wire."""
        return self._last.exposed_s if self._last else 0.0

    @property
    def compute_s(self) -> float:
        """The rest: computing, and everything else that is not waiting."""
        return max(self.train_s - self.exposed_s, 0.0)

    @property
    def sent_bytes(self) -> int:
        """Put on the wire so far."""
        return self._last.sent_bytes if self._last else 0

    @property
    def exposed_share(self) -> float:
        """Of the training time."""
        return self.exposed_s / self.train_s if self.train_s > 0 else 0.0

    @property
    def samples_per_s(self) -> float:
        """Over the whole training."""
        if self.ended is not None:
            return self.ended.samples / max(self.ended.train_s, 1e-9)
        samples, before_s = 0.0, 0.0
        for progress in self.progress:
            samples += progress.samples_per_s * (progress.train_s - before_s)
            before_s = progress.train_s
        return samples / before_s if before_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All workers of one run folder."""

    folder: Path
    facts: Mapping[str, Any]
    """config.json as it is: config, versions, host, cores, command, created."""
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    world_size: int
    workers: tuple[Worker, ...]
    evaluated: tuple[Evaluated, ...]
    summary: Summary | None
    failures: tuple[Event, ...]
    """Causes first, then what only followed from them."""
    state: State
    starts: int
    """1, and one more for each time it was resumed."""
    last_time: float
    """Of the newest event, in seconds since 1970."""
    skipped: int
    """Lines of the event files that could not be read."""

    @property
    def recipe(self) -> str:
        """What was trained."""
        return str(self.config.get("recipe", "unknown"))

    @property
    def strategy(self) -> str:
        """How the workers talked, without its settings."""
        return str(self.config.get("strategy", "unknown"))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of the strategy."""
        found = self.config.get("settings", {})
        return found if isinstance(found, Mapping) else {}

    @property
    def seconds(self) -> str:
        """The unit of its clock."""
        return "virtual seconds" if self.config.get("clock") == "virtual" else "seconds"

    @property
    def num_steps(self) -> int:
        """Steps it is meant to make, 0 if that is not known."""
        return max((w.progress[-1].num_steps for w in self.workers if w.progress), default=0)

    @property
    def steps(self) -> int:
        """Steps of the furthest worker."""
        return max((worker.steps for worker in self.workers), default=0)

    @property
    def train_s(self) -> float:
        """Seconds of training, mean over workers."""
        return self._mean([worker.train_s for worker in self.workers])

    @property
    def samples_per_s(self) -> float:
        """Of all workers together."""
        return self._mean([worker.samples_per_s for worker in self.workers]) * self.world_size

    @property
    def exposed_share(self) -> float:
        """Of the training time, mean over workers."""
        return self._mean([worker.exposed_share for worker in self.workers])

    @property
    def sent_bytes_per_step(self) -> float:
        """By one worker, on average."""
        return self._mean([w.sent_bytes / w.steps for w in self.workers if w.steps])

    @property
    def step_s(self) -> float:
        """Seconds per step, mean over workers."""
        return self._mean([w.train_s / w.steps for w in self.workers if w.steps])

    @property
    def exposed_s_per_step(self) -> float:
        """Seconds of a step spent waiting for the wire, mean over workers."""
        return self._mean([w.exposed_s / w.steps for w in self.workers if w.steps])

    def losses(self) -> list[Point]:
        """Training loss against seconds of training, mean over workers."""
        curves = [
            [(p.train_s, p.loss) for p in worker.progress if p.loss is not None] for worker in self.workers
        ]
        curves = [curve for curve in curves if curve]
        if not curves:
            return []
        return [(at_s, self._mean(_latest(curves, at_s))) for at_s, _ in curves[0]]

    def values(self) -> list[Point]:
        """The metric on the test data against seconds of training."""
        return [(e.train_s, e.value) for e in self.evaluated if e.value is not None]

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0


def _latest(curves: Sequence[Sequence[Point]], at_s: float) -> list[float]:
    """What each curve was at last; one that has not begun is left out."""
    places = [bisect_right(curve, at_s, key=lambda point: point[0]) for curve in curves]
    return [curve[place - 1][1] for curve, place in zip(curves, places, strict=True) if place]


def read_run(folder: Path) -> Run | None:
    """The run of a folder; None if its events tell of none (there are none, or only benchmark steps)."""
    reader = EventReader(folder)
    return make_run(folder, reader.poll(), reader.skipped)


def make_run(folder: Path, events: Sequence[Event], skipped: int) -> Run | None:
    """Put the events of a run together."""
    starts = [event for event in events if isinstance(event.record, RunStarted)]
    failures = [event for event in events if isinstance(event.record, Failed)]
    evaluated = [event.record for event in events if isinstance(event.record, Evaluated)]
    summary = next((e.record for e in reversed(events) if isinstance(e.record, Summary)), None)
    workers = _workers(events)
    if not workers and not evaluated and summary is None:
        return None
    facts = read_json(folder / CONFIG)
    started = starts[-1].record if starts else None
    world_size = len(workers)
    config, versions = facts.get("config", {}), facts.get("versions", {})
    if isinstance(started, RunStarted):
        world_size, config, versions = started.world_size, started.config, started.versions
    elif summary is not None:
        names = ("recipe", "strategy", "settings", "workers")
        world_size, config = summary.workers, {**{name: getattr(summary, name) for name in names}, **config}
    return Run(
        folder=folder,
        facts=facts,
        config=config,
        versions=versions,
        world_size=world_size,
        workers=tuple(worker for worker in workers if worker.rank < world_size),
        evaluated=tuple(_redone(evaluated)),
        summary=summary,
        failures=tuple(sorted(failures, key=_cause_first)),
        state=_state(events),
        starts=max(Counter(event.rank for event in starts).values(), default=1),
        last_time=max(event.time for event in events),
        skipped=skipped,
    )


def _workers(events: Sequence[Event]) -> list[Worker]:
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
        Worker(
            rank=rank,
            host=hosts.get(rank, "unknown"),
            progress=tuple(_redone(progress.get(rank, []))),
            ended=ended.get(rank),
        )
        for rank in sorted({*hosts, *progress, *ended})
    ]


def _redone(records: Sequence[Step]) -> list[Step]:
    """Without the steps that a resumed run went back behind and did again."""
    kept: list[Step] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def _cause_first(event: Event) -> tuple[bool, float]:
    return isinstance(event.record, Failed) and event.record.consequence, event.time


def _state(events: Sequence[Event]) -> State:
    """How the newest attempt stands: a start puts what its worker said before into the past."""
    state: dict[int, State] = {}
    for event in events:
        match event.record:
            case RunStarted():
                state[event.rank] = "unfinished"
            case Failed():
                state[event.rank] = "failed"
            case Summary():
                state[event.rank] = "finished"
            case _:
                pass
    if "failed" in state.values():
        return "failed"
    return "finished" if "finished" in state.values() else "unfinished"


def read_json(path: Path) -> dict[str, Any]:
    """What a file says about where numbers come from; nothing if it is absent or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
