"""Runs a configuration while somebody watches: starts workers, follows their events, explains their end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from thinwire.cli.folders import results_folder
from thinwire.cli.output import note
from thinwire.cli.state import RunState
from thinwire.cli.view import LineView, View, choose_view
from thinwire.errors import SettingError, ThinwireError
from thinwire.events import FOLDER, Event, EventReader, EventWriter, Failed, Summary, plain
from thinwire.recipes.config import FILE, RunConfig, write_config
from thinwire.recipes.launch import LocalWorkers, first_death, tail
from thinwire.recipes.scalars import Scalars
from thinwire.recipes.worker import work
from thinwire.units import count

POLL_S = 0.1
LAUNCHER_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that came to its end."""

    summary: Summary
    wall_s: float
    """Seconds from start to end, starting the workers included."""
    folder: Path

    def as_json(self) -> dict[str, object]:
        """What --json prints."""
        return {**plain(self.summary), "wall_s": self.wall_s, "run": str(self.folder)}


def run_folder(out: Path | None, config: RunConfig) -> Path:
    """A folder for the run, empty unless the run in it is to be resumed."""
    if config.resume and out is None:
        raise SettingError("--resume needs --out: the folder of the run to go on with")
    return results_folder(
        out,
        f"{config.recipe}-{config.strategy}",
        may_hold=lambda folder: config.resume and (folder / FILE).exists(),
        hint="name another folder, or go on with a run that saves checkpoints by --resume",
    )


def run_here(folder: Path, config: RunConfig, *, tensorboard: bool = False) -> Outcome:
    """Run on workers of this machine until they end; ThinwireError says why if they fail."""
    began = time.monotonic()
    state, reader = RunState(config.workers), EventReader(folder)
    reader.poll()  # what a run that is resumed has said before
    title = f"{config.recipe}, {config.strategy}, {count(config.workers, 'worker')}, results in {folder}"
    try:
        with _written(folder, config, state):
            with (
                choose_view(title) as view,
                curves(folder, tensorboard) as draw,
                LocalWorkers(folder, config.workers) as workers,
            ):
                status = _follow(state, reader, view, workers, draw)
            for event in reader.poll():  # what workers wrote while they were ended
                state.apply(event)
            if status != 0 or state.summary is None:
                tell_death(folder, state, workers.log)
                raise explain(state, workers.log, status)
    except KeyboardInterrupt:
        note(f"interrupted; what was written so far is in {folder}")
        raise
    return Outcome(state.summary, time.monotonic() - began, folder)


@contextmanager
def _written(folder: Path, config: RunConfig, state: RunState) -> Iterator[None]:
    """Keep the configuration in the folder; if a run cannot be gone on with, the one it had."""
    path = folder / FILE
    before = path.read_bytes() if path.exists() else None
    write_config(folder, config)
    try:
        yield
    except BaseException:
        if before is not None and not state.progress:
            path.write_bytes(before)
        raise


@contextmanager
def curves(folder: Path, tensorboard: bool) -> Iterator[Callable[[Event], None]]:
    """What draws the curves of events, if anything is to."""
    if not tensorboard:
        yield lambda event: None
        return
    with Scalars(folder) as scalars:
        yield scalars.write


def _follow(
    state: RunState, reader: EventReader, view: View, workers: LocalWorkers, draw: Callable[[Event], None]
) -> int:
    """Show the run until the launcher ends, and return its status; 1 if it is slow to end after a failure."""
    deadline = math.inf
    while (status := workers.poll()) is None:
        for event in reader.poll():
            state.apply(event)
            draw(event)
        for pid in state.pids.values():
            workers.knows(pid)
        view.show(state)
        if state.failures and deadline == math.inf:
            # the launcher waits half a minute for a worker that hangs; that is ours to cut short
            deadline = time.monotonic() + LAUNCHER_GRACE_S
        if time.monotonic() > deadline:
            return 1
        time.sleep(POLL_S)
    for event in reader.poll():
        state.apply(event)
        draw(event)
    view.show(state)
    return status


def tell_death(folder: Path, state: RunState, log: Path) -> None:
    """Write for a worker that was killed what it could not write itself."""
    death, cause = first_death(log), state.root_cause
    if death is None or death.rank in {event.rank for event in state.failures}:
        return
    if cause is not None and isinstance(cause.record, Failed) and not cause.record.consequence:
        return  # that is what ended the run, and this worker with it
    host = state.hosts.get(death.rank, "this machine")
    memory = "often the system was out of memory: try fewer workers or a smaller batch; "
    told = Failed(
        host=host,
        error="Killed",
        message=f"worker {death.rank} on {host} {death.how} (pid {death.pid})",
        hint=f"{memory if death.status == -9 else ''}the workers' output is in {log}",
    )
    with EventWriter(folder, death.rank) as writer:
        state.apply(writer.write(told))


def explain(state: RunState, log: Path, status: int) -> ThinwireError:
    """One error for all that went wrong: the root cause, with worker and host."""
    cause = state.root_cause
    if cause is not None and isinstance(cause.record, Failed):
        failed = cause.record
        who = "" if failed.message.startswith("worker ") else f"worker {cause.rank} on {failed.host}: "
        if failed.expected:
            return ThinwireError(who + failed.message, hint=failed.hint or f"the workers' output is in {log}")
        return ThinwireError(f"{who}{failed.error}: {failed.message}", hint=f"the traceback is in {log}")
    last = tail(log.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    return ThinwireError(
        f"the workers ended without a result (status {status})" + (f": {last}" if last else ""),
        hint=f"the workers' output is in {log}",
    )


def run_under_torchrun(out: Path | None, config: RunConfig, *, tensorboard: bool = False) -> Outcome | None:
    """Be one of torchrun's workers; on rank 0 show progress and return the result."""
    rank = int(os.environ["RANK"])
    if out is None:
        raise SettingError(
            "--out must be given under torchrun, so that all workers name the same folder",
            hint="for example --out runs/first",
        )
    if (out / FOLDER / f"worker-{rank}.jsonl").exists() and not config.resume:
        raise SettingError(
            f"--out must be a new folder, and {out} holds another run", hint="name another folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    if rank != 0:
        with curves(out, tensorboard) as draw:
            work(out, config, os.environ, draw)
        return None
    began = time.monotonic()
    state = RunState(config.workers)
    title = f"{config.recipe}, {config.strategy}, {count(config.workers, 'worker')}, results in {out}"
    with _written(out, config, state), LineView(title) as view, curves(out, tensorboard) as draw:

        def watch(event: Event) -> None:
            state.apply(event)
            view.show(state)
            draw(event)

        work(out, config, os.environ, watch)
    assert state.summary is not None, "rank 0 writes a summary when training ends well"
    return Outcome(state.summary, time.monotonic() - began, out)
