"""`thinwire train`: a recipe on local workers or, under torchrun, as one of its workers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.output import table
from thinwire.cli.run import Outcome, run_folder, run_here, run_under_torchrun
from thinwire.errors import SettingError
from thinwire.recipes import registry, scalars
from thinwire.recipes.config import Choices, resolve
from thinwire.units import as_bytes, as_duration, as_metric, as_percent

DEFAULT_WORKERS = 4


def train(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="See `thinwire recipes`; or module:function of your own."),
    ] = registry.DEFAULT,
    strategy: Annotated[
        str, typer.Option(help="How workers talk; see `thinwire strategies`.")
    ] = "all-reduce",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the strategy; repeatable."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help=f"Workers on this machine ({DEFAULT_WORKERS}); torchrun sets its own.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Times through the data (the recipe's).")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per worker and step (the recipe's).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, shuffling and dropout.")] = 0,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder with the recipe's data.")] = None,
    shuffle: Annotated[
        str, typer.Option(help="dealt: all workers have all data; own: each keeps a part; ring: parts mix.")
    ] = "dealt",
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; workers may share a GPU. auto: cuda if there is one.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for the results (below runs/).")
    ] = None,
    save_every: Annotated[
        int, typer.Option(metavar="STEPS", help="Save a checkpoint every so many steps, and at the end.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out, if there is one.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write curves for TensorBoard into the results too.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Write a Chrome trace of a few steps into the results.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Train a recipe, here on several workers or, started by torchrun, as one of its workers."""
    torchrun = "RANK" in os.environ
    choices = Choices(
        strategy=strategy,
        settings=parse_settings(settings or []),
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
    )
    config = resolve(recipe, registry.get(recipe), choices)
    if tensorboard:
        scalars.check_installed()
    if torchrun:
        outcome = run_under_torchrun(out, config, tensorboard=tensorboard)
    else:
        outcome = run_here(run_folder(out, config), config, tensorboard=tensorboard)
    if outcome is None:
        return  # only rank 0 of torchrun's workers has something to print
    typer.echo(json.dumps(outcome.as_json()) if as_json else summary(outcome))


def parse_settings(pairs: list[str]) -> dict[str, str]:
    """The settings in a list of key=value."""
    parsed = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise typer.BadParameter(f"--set expects KEY=VALUE, got {pair!r}")
        parsed[key.strip()] = value.strip()
    return parsed


def _num_workers(asked: int | None, torchrun: bool) -> int:
    if not torchrun:
        return DEFAULT_WORKERS if asked is None else asked
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if asked not in (None, world_size):
        raise SettingError(
            f"workers must be torchrun's {world_size}, got {asked}", hint="leave --workers out under torchrun"
        )
    return world_size


def summary(outcome: Outcome) -> str:
    """The result for people."""
    result = outcome.summary
    verdict = "reached" if result.reached else "missed"
    value = "unknown" if result.value is None else as_metric(result.metric, result.value)
    target = as_metric(result.metric, result.target)
    per_step = as_bytes(result.sent_bytes_per_step)
    rows = [
        (result.metric, f"{value} (target {target}: {verdict})"),
        ("time", f"{as_duration(outcome.wall_s)}, of which training {as_duration(result.train_s)}"),
        ("speed", f"{result.samples_per_s:,.0f} samples/s with {result.workers} workers"),
        ("sent", f"{per_step} per step and worker, {as_bytes(result.sent_bytes)} in all"),
        ("exposed", f"{as_percent(result.exposed_share)} of training time spent waiting for the wire"),
        *((name.replace("_", " "), f"{value:.3g}") for name, value in result.instruments.items()),
        ("results", str(outcome.folder)),
    ]
    return table(rows)
