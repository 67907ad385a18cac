"""Where a run stands, put together from its events; what the views show."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.events import Evaluated, Event, Failed, Progress, RunStarted, Summary


@dataclass(slots=True)
class RunState:
    """All workers together, as far as they have been heard of."""

    num_workers: int
    pids: dict[int, int] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    evaluated: Evaluated | None = None
    summary: Summary | None = None
    failures: list[Event] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Take one more event into account."""
        match event.record:
            case RunStarted() as started:
                self.pids[event.rank] = started.pid
                self.hosts[event.rank] = started.host
            case Progress() as progress:
                self.progress[event.rank] = progress
            case Evaluated() as evaluated:
                self.evaluated = evaluated
            case Summary() as summary:
                self.summary = summary
            case Failed():
                self.failures.append(event)
            case _:
                pass

    @property
    def latest(self) -> Progress | None:
        """The furthest worker's progress."""
        return max(self.progress.values(), key=lambda p: p.step, default=None)

    @property
    def loss(self) -> float | None:
        """Mean training loss over the workers heard of."""
        losses = [p.loss for p in self.progress.values() if p.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def samples_per_s(self) -> float:
        """Of all workers together."""
        return self._mean([p.samples_per_s for p in self.progress.values()]) * self.num_workers

    @property
    def sent_bytes(self) -> float:
        """By all workers together."""
        return self._mean([float(p.sent_bytes) for p in self.progress.values()]) * self.num_workers

    @property
    def exposed_share(self) -> float:
        """Of the training time, averaged over workers."""
        return self._mean([p.exposed_s / p.train_s for p in self.progress.values() if p.train_s > 0])

    @property
    def instruments(self) -> dict[str, float]:
        """What the strategy tells of itself, averaged over workers."""
        told = [each.instruments for each in self.progress.values()]
        names = self.latest.instruments if self.latest else {}
        return {
            name: self._mean([each[name] for each in told if each.get(name) is not None]) for name in names
        }

    @property
    def done_share(self) -> float:
        """Of all steps."""
        return self.latest.step / self.latest.num_steps if self.latest else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds of training to go, if it goes on like this."""
        latest = self.latest
        return latest.train_s / latest.step * (latest.num_steps - latest.step) if latest else None

    @property
    def root_cause(self) -> Event | None:
        """The failure that led to the others: the first that does not only follow from a lost peer."""
        own = [
            event
            for event in self.failures
            if isinstance(event.record, Failed) and not event.record.consequence
        ]
        return min(own or self.failures, key=lambda event: event.time, default=None)

    def _mean(self, values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0
