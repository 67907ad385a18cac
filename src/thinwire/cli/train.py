"""`thinwire train`: trains a recipe on local workers or, under torchrun, as one of its workers."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli import options
from thinwire.cli.output import columns, note, results_folder
from thinwire.cli.view import LineView, progress_view
from thinwire.errors import SettingError, check
from thinwire.event_log import FOLDER
from thinwire.events import Event, plain
from thinwire.files import locked
from thinwire.hosts.machine import Machine
from thinwire.hosts.quantities import whole
from thinwire.recipes import registry
from thinwire.recipes.config import FILE, RunConfig, resolve
from thinwire.recipes.follow import (
    FinishedRun,
    RunState,
    curves,
    lock_name,
    run_local,
    tensorboard_writer,
    written,
)
from thinwire.recipes.worker import work
from thinwire.units import as_bytes, as_duration, as_metric, as_percent, count

DEFAULT_WORKERS = 4
JOIN = "THINWIRE_JOIN"


def train(
    recipe: options.Recipe = registry.DEFAULT,
    strategy: Annotated[
        str,
        typer.Option(metavar=options.STRATEGY, help="How workers communicate; see `thinwire strategies`."),
    ] = "all-reduce",
    workers: Annotated[
        int | None, typer.Option(help=f"Workers on this machine ({DEFAULT_WORKERS}); torchrun sets its own.")
    ] = None,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Start more workers than this machine has room for.")
    ] = False,
    epochs: options.Epochs = None,
    batch_size: options.BatchSize = None,
    seed: options.Seed = 0,
    data: options.Data = None,
    shuffle: options.Shuffle = "dealt",
    apoptosis: options.Apoptosis = "",
    elastic: Annotated[
        bool,
        typer.Option("--elastic", help="Go on when workers die, come back or join (THINWIRE_JOIN joins)."),
    ] = False,
    device: options.Device = "auto",
    out: options.Out = None,
    save_every: Annotated[
        int, typer.Option(metavar="STEPS", help="Steps between two checkpoints; the last step saves one too.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint in --out, if there is one.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write curves for TensorBoard into the results too.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a Chrome trace of a few steps into the results.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Train a recipe on workers of this machine or, started by torchrun, as one of its workers."""
    torchrun = "RANK" in os.environ or (elastic and bool(os.environ.get(JOIN)))
    config = resolve(
        recipe,
        strategy,
        workers=_num_workers(workers, torchrun),
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        data=data,
        save_every=save_every,
        resume=resume,
        device=device,
        profile=profile,
        shuffle=shuffle,
        apoptosis=apoptosis,
        elastic=elastic,
    )
    if not torchrun:
        Machine.this().check_workers(config.workers, insist=oversubscribe)
    if config.workers == 1:
        note(f"one worker: nothing is sent, so {config.strategy} trains as any other strategy would")
    if tensorboard:
        tensorboard_writer()  # it is missed before training, not after
    run = (_under_torchrun if torchrun else _here)(out, config, tensorboard)
    if run is not None:  # under torchrun only rank 0 has something to print
        result = {**plain(run.summary), "wall_s": run.wall_s, "run": str(run.folder)}
        typer.echo(json.dumps(result) if as_json else summary(run))
        for lost in run.lost:
            note(f"worker {lost.rank} {lost.how} (pid {lost.pid}); the others went on")


def _num_workers(asked: int | None, torchrun: bool) -> int:
    if not torchrun or "RANK" not in os.environ:  # one that joins says of how many the run was meant to be
        return DEFAULT_WORKERS if asked is None else asked
    world_size, rank = _number("WORLD_SIZE"), _number("RANK")
    check(0 <= rank < world_size, "RANK", f"0 to WORLD_SIZE - 1 ({world_size - 1})", rank, hint=_TORCHRUN)
    hint = "leave --workers out under torchrun"
    check(asked in (None, world_size), "workers", f"torchrun's {world_size}", asked, hint=hint)
    return world_size


_TORCHRUN = "torchrun sets RANK and WORLD_SIZE; without it, unset RANK to start workers here"


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return whole(text, variable, "a whole number", text, hint=_TORCHRUN)


def _title(folder: Path, config: RunConfig) -> str:
    return f"{config.recipe}, {config.strategy}, {count(config.workers, 'worker')}, results in {folder}"


def _here(out: Path | None, config: RunConfig, tensorboard: bool) -> FinishedRun:
    """Train on workers of this machine, in a folder that is empty unless the run in it is to be resumed."""
    if config.resume and out is None:
        raise SettingError("--resume needs --out: the folder of the run to resume")
    folder = results_folder(
        out,
        f"{config.recipe}-{config.strategy}",
        may_hold=lambda folder: config.resume and (folder / FILE).exists(),
        hint="name another folder, or use --resume with a run that saves checkpoints",
    )
    try:
        with progress_view(_title(folder, config)) as show, _curves(folder, tensorboard) as draw:

            def watch(state: RunState, events: list[Event]) -> None:
                for event in events:
                    draw(event)
                show(state)

            return run_local(folder, config, watch)
    except KeyboardInterrupt:
        note(f"interrupted; the results so far are in {folder}")
        raise


def _under_torchrun(out: Path | None, config: RunConfig, tensorboard: bool) -> FinishedRun | None:
    """Train as one of torchrun's workers; rank 0 shows progress and returns the result."""
    if out is None:
        raise SettingError(
            "--out must be given under torchrun, so that all workers name the same folder",
            hint="for example --out runs/first",
        )
    joins = config.elastic and bool(os.environ.get(JOIN))
    rank = int(os.environ.get("RANK") or _free_number(out, config.workers))
    if (out / FOLDER / f"worker-{rank}.jsonl").exists() and not (config.resume or joins):
        message = f"--out must be a new folder, and {out} holds another run"
        raise SettingError(message, hint="name another folder")
    out.mkdir(parents=True, exist_ok=True)
    began_s, state = time.monotonic(), RunState(config.workers)
    view = LineView(_title(out, config)) if rank == 0 else None
    with (
        locked(out, lock_name(rank)),
        written(out, config, state) if rank == 0 and not joins else nullcontext(),
        _curves(out, tensorboard) as draw,
    ):

        def watch(event: Event) -> None:
            draw(event)
            state.apply([event])
            if view is not None:
                view.show(state)

        work(out, config, {**os.environ, "RANK": str(rank)}, watch)
    return FinishedRun(state.summary, time.monotonic() - began_s, out) if state.summary else None


def _free_number(folder: Path, first: int) -> int:
    """The number of a worker that joins: the first that has no events there."""
    return next(n for n in itertools.count(first) if not (folder / FOLDER / f"worker-{n}.jsonl").exists())


def _curves(folder: Path, wanted: bool) -> AbstractContextManager[Callable[[Event], None]]:
    return curves(folder) if wanted else nullcontext(lambda event: None)


def summary(run: FinishedRun) -> str:
    """The result as a table for people."""
    result = run.summary
    verdict = "reached" if result.reached else "missed"
    value = "unknown" if result.value is None else as_metric(result.metric, result.value)
    target = as_metric(result.metric, result.target)
    per_step = as_bytes(result.sent_bytes_per_step)
    rows = [
        (result.metric, f"{value} (target {target}: {verdict})"),
        ("time", f"{as_duration(run.wall_s)}, of which training {as_duration(result.train_s)}"),
        ("speed", f"{result.samples_per_s:,.0f} samples/s with {result.workers} workers"),
        ("sent", f"{per_step} per step and worker, {as_bytes(result.sent_bytes)} in all"),
        ("exposed", f"{as_percent(result.exposed_share)} of training time spent waiting for the wire"),
        *((name.replace("_", " "), f"{value:.3g}") for name, value in result.instruments.items()),
        ("results", str(run.folder)),
    ]
    return columns(rows, left=(0, 1))
