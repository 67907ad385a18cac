"""Follows a run through its events: its state, curves for TensorBoard, and how it ended."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.errors import MissingExtra, ThinwireError
from thinwire.event_log import EventReader, EventWriter
from thinwire.events import Evaluated, Event, Failed, Progress, RunStarted, Shrunk, Summary
from thinwire.files import locked
from thinwire.recipes.config import FILE, RunConfig, write_config
from thinwire.recipes.elastic_launch import ElasticWorkers
from thinwire.recipes.launch import LOG, LocalWorkers, WorkerFailure

RESUMING = "config.resuming.json"
"""The configuration of a run that is about to be resumed."""
POLL_S = 0.1
LAUNCHER_GRACE_S = 3.0
START_GRACE_S = 30.0
"""For an elastic run in which a worker has died before anybody has made a step."""
TIMED_OUT = 124
"""Status of workers that were ended because their time was up."""


@dataclass(slots=True)
class RunState:
    """All workers together, as far as their events have been read."""

    num_workers: int
    started: dict[int, RunStarted] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    evaluated: Evaluated | None = None
    shrunk: Shrunk | None = None
    """The last event of apoptosis."""
    summary: Summary | None = None
    failures: list[tuple[float, int, Failed]] = field(default_factory=list)
    """With time and rank."""

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            match event.record:
                case RunStarted() as started:
                    self.started[event.rank] = started
                case Progress() as progress:
                    self.progress[event.rank] = progress
                case Evaluated() as evaluated:
                    self.evaluated = evaluated
                case Shrunk() as shrunk:
                    self.shrunk = shrunk
                case Summary() as summary:
                    self.summary = summary
                case Failed() as failed:
                    self.failures.append((event.time, event.rank, failed))

    @property
    def latest(self) -> Progress | None:
        """The furthest worker's progress."""
        return max(self.progress.values(), key=lambda p: p.step, default=None)

    def mean(self, read: Callable[[Progress], float | None]) -> float | None:
        """A number averaged over the workers that have reported it; None if there are none."""
        values = [value for p in self.progress.values() if (value := read(p)) is not None]
        return fmean(values) if values else None

    @property
    def done_share(self) -> float:
        return self.latest.step / self.latest.num_steps if self.latest else 0.0

    @property
    def left_s(self) -> float | None:
        """Estimated seconds of training left."""
        latest = self.latest
        return latest.train_s / latest.step * (latest.num_steps - latest.step) if latest else None

    @property
    def root_cause(self) -> tuple[int, Failed] | None:
        """The failure that caused the others, with its rank: the first that does not follow from another."""
        ordered = sorted(self.failures, key=lambda failure: (failure[2].consequence, failure[0]))
        return ordered[0][1:] if ordered else None


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run that trained to its end."""

    summary: Summary
    wall_s: float
    """Seconds from start to end, starting the workers included."""
    folder: Path
    lost: tuple[WorkerFailure, ...] = ()
    """Workers without which an elastic run has gone on."""


Watch = Callable[[RunState, list[Event]], object]
"""Called several times a second with the state of the run and the events that are new in it."""


def run_local(
    folder: Path, config: RunConfig, watch: Watch | None = None, *, limit_s: float = math.inf
) -> FinishedRun:
    """Train on workers of this machine until they end; ThinwireError says why if they fail."""
    began_s = time.monotonic()
    state, reader = RunState(config.workers), EventReader(folder)
    with locked(folder, lock_name(0)), written(folder, config, state) as name:
        reader.poll()  # skip the events of a run that is resumed
        start = ElasticWorkers if config.elastic else LocalWorkers
        with start(folder, config.workers, arguments=[name]) as workers:
            status = follow(workers, reader, state, watch, limit_s)
        state.apply(reader.poll())  # written while the workers were being ended
        if status != 0 or state.summary is None:
            raise explain(folder, state, status, workers.failure)
    return FinishedRun(state.summary, time.monotonic() - began_s, folder, tuple(workers.lost))


def lock_name(rank: int) -> str:
    """The lock by which a run holds its folder: one for each worker that torchrun starts, else the first."""
    return f".lock-{rank}"


@contextmanager
def written(folder: Path, config: RunConfig, state: RunState) -> Iterator[str]:
    """Write the configuration into the folder, and yield the name of its file for the workers.

    That of a run to be resumed is replaced when the run was resumed, and not if that was refused or somebody
    ended the command before.
    """
    name = RESUMING if (folder / FILE).exists() else FILE
    write_config(folder, config, name)
    try:
        yield name
    finally:
        if name == RESUMING and (state.progress or state.summary is not None):
            (folder / RESUMING).replace(folder / FILE)
        (folder / RESUMING).unlink(missing_ok=True)


def follow(
    workers: LocalWorkers | ElasticWorkers,
    reader: EventReader,
    state: RunState,
    watch: Watch | None = None,
    limit_s: float = math.inf,
) -> int:
    """Read events until the launcher ends; its status, or 1 if it hangs after a failure, or TIMED_OUT."""
    deadline_s, late = time.monotonic() + limit_s, TIMED_OUT
    start_by_s = time.monotonic() + START_GRACE_S
    while True:
        status = workers.poll()
        events = reader.poll()
        state.apply(events)
        if watch is not None:
            watch(state, events)
        workers.worker_pids.update(started.pid for started in state.started.values())
        if state.failures and workers.end_together and late == TIMED_OUT:
            # the elastic agent would wait half a minute for a worker that hangs
            deadline_s, late = time.monotonic() + LAUNCHER_GRACE_S, 1
        if state.progress or workers.end_together or workers.failure is None:
            start_by_s = time.monotonic() + START_GRACE_S
        if status is not None or time.monotonic() > deadline_s:
            return late if status is None else status
        if time.monotonic() > start_by_s:
            return 1  # the others wait for one that will never attach
        time.sleep(POLL_S)


def explain(folder: Path, state: RunState, status: int, killed: WorkerFailure | None = None) -> ThinwireError:
    """One error for a failed run: the root cause, with worker and host.

    The event of a worker that was `killed`, and so could not write it itself, is written here.
    """
    cause, log = state.root_cause, folder / LOG
    told = {rank for _, rank, _ in state.failures}
    in_log = f"the workers' output is in {log}"
    # if another worker failed by itself, this one was ended because of it
    if killed is not None and killed.rank not in told and (cause is None or cause[1].consequence):
        host = state.started[killed.rank].host if killed.rank in state.started else "this machine"
        memory = "often the system was out of memory: try fewer workers or a smaller batch; "
        message = f"worker {killed.rank} on {host} {killed.how} (pid {killed.pid})"
        hint = memory + in_log if killed.status == -9 else in_log
        record = Failed(host=host, error="Killed", message=message, hint=hint)
        with EventWriter(folder, killed.rank) as writer:
            state.apply([writer.write(record)])
        cause = killed.rank, record
    if cause is not None:
        rank, failed = cause
        who = "" if failed.message.startswith("worker ") else f"worker {rank} on {failed.host}: "
        if failed.expected:
            return ThinwireError(who + failed.message, hint=failed.hint or in_log)
        return ThinwireError(f"{who}{failed.error}: {failed.message}", hint=f"the traceback is in {log}")
    if status == TIMED_OUT:
        return ThinwireError("the time is up", hint=in_log)
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    last = next((f": {line.rstrip()}" for line in reversed(lines) if line.strip()), "")
    return ThinwireError(f"the workers ended without a result (status {status}){last}", hint=in_log)


def tensorboard_writer() -> Any:
    """The class of TensorBoard's own writer (torch's would make the command line wait for torch)."""
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        message = f"TensorBoard scalars need a package that is not installed ({error})"
        raise MissingExtra(message, hint="pip install 'thinwire[tensorboard]'") from None
    return Writer


@contextmanager
def curves(run: Path) -> Iterator[Callable[[Event], None]]:
    """Yield a function that adds an event to the curves below the run folder, for `tensorboard --logdir RUN`.

    Each worker is a TensorBoard run of its own, so that their curves lie on each other.
    """
    make = tensorboard_writer()
    with ExitStack() as files:

        @functools.cache
        def writer(rank: int) -> Any:
            opened = make(str(run / "tensorboard" / f"worker-{rank}"))
            files.callback(opened.close)
            return opened

        def draw(event: Event) -> None:
            match event.record:
                case Progress() as record:
                    values: dict[str, float | None] = {
                        "train/loss": record.loss,
                        "train/epoch": record.epoch,
                        "train/samples_per_s": record.samples_per_s,
                        "wire/sent_bytes": record.sent_bytes,
                        "wire/exposed_s": record.exposed_s,
                        "wire/exposed_share": record.exposed_s / max(record.train_s, 1e-9),
                        **{f"strategy/{name}": value for name, value in record.instruments.items()},
                    }
                case Evaluated() as record:
                    values = {f"test/{record.metric}": record.value, "test/loss": record.loss}
                case _:
                    return
            for tag, value in values.items():
                if value is not None:
                    writer(event.rank).add_scalar(tag, value, record.step, wall_time=event.time)

        yield draw
