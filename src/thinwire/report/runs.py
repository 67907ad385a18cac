"""One run and its workers, finished or not, with the numbers that tables and plots are made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thinwire.events import Evaluated, Event, Progress, RunEnded, Summary

State = Literal["finished", "failed", "unfinished"]
Point = tuple[float, float]


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
    aim: float | None = None
    """What a benchmark has it aim at instead of its recipe's target."""

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

    def values_by_epoch(self) -> list[Point]:
        """The metric on the test data against epochs."""
        return [(e.epoch, e.value) for e in self.evaluated if e.value is not None]

    def distances(self) -> list[Point]:
        """How far replicas are from their mean, against epochs, where somebody has measured it."""
        return [(e.epoch, e.distance) for e in self.evaluated if e.distance is not None]

    @staticmethod
    def _mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0


def _latest(curves: Sequence[Sequence[Point]], at_s: float) -> list[float]:
    """What each curve was at last; one that has not begun is left out."""
    places = [bisect_right(curve, at_s, key=lambda point: point[0]) for curve in curves]
    return [curve[place - 1][1] for curve, place in zip(curves, places, strict=True) if place]


def seconds_of(runs: Iterable[Run]) -> str:
    """The unit of the clocks of several runs."""
    units = {run.seconds for run in runs}
    return units.pop() if len(units) == 1 else "real and virtual seconds"
