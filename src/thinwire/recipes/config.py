"""A run's configuration, fully resolved, and the file that keeps it next to the results."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from thinwire.errors import DataError, check, check_one_of
from thinwire.recipes.base import Recipe
from thinwire.strategies import registry as strategies

FILE = "config.json"
CHECKPOINTS = "checkpoints"
"""The folder of them in a run folder."""
DEVICES = ("auto", "cpu", "cuda")
SHUFFLES = ("dealt", "own", "ring")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All that a worker is told about its run."""

    recipe: str
    strategy: str
    settings: Mapping[str, object]
    """Of the strategy, defaults included."""
    workers: int
    epochs: int
    batch_size: int
    """Of one worker."""
    seed: int
    data: str | None
    """The folder named with --data."""
    save_every: int = 0
    """Steps between two checkpoints; 0: none are saved."""
    resume: bool = False
    """Whether to go on from the newest checkpoint in the run folder."""
    device: str = "auto"
    """What to compute on: "cpu", "cuda", or "auto" for cuda where there is one."""
    profile: bool = False
    """Whether each worker writes a trace of a few steps."""
    evaluate_every: int = 0
    """Steps between two evaluations, beside those at the end of every epoch; 0: only those."""

    shuffle: str = "dealt"
    """Who trains on which samples: "dealt" out anew in every epoch, each worker having all of them; its "own"
    part, shuffled by itself; or its own part, whose samples travel in a "ring"."""

    def __post_init__(self) -> None:
        check_one_of("device", self.device, DEVICES)
        check_one_of("shuffle", self.shuffle, SHUFFLES)
        check(self.workers >= 1, "workers", "at least 1", self.workers)
        check(self.epochs >= 1, "epochs", "at least 1", self.epochs)
        check(self.batch_size >= 1, "batch size", "at least 1", self.batch_size)
        check(self.save_every >= 0, "save every", "0 or more steps", self.save_every)
        check(self.evaluate_every >= 0, "evaluate every", "0 or more steps", self.evaluate_every)
        check(0 <= self.seed < 2**63, "seed", "from 0 to 2**63 - 1", self.seed)

    @property
    def data_folder(self) -> Path | None:
        """The data folder as a path."""
        return None if self.data is None else Path(self.data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """What a user chose; None is the recipe's default."""

    strategy: str
    settings: Mapping[str, str]
    workers: int
    epochs: int | None = None
    batch_size: int | None = None
    seed: int = 0
    data: Path | None = None
    save_every: int = 0
    resume: bool = False
    device: str = "auto"
    profile: bool = False
    shuffle: str = "dealt"


def resolve(recipe_name: str, recipe: Recipe, choices: Choices) -> RunConfig:
    """The configuration that `choices` and the recipe's defaults amount to; wrong ones are refused here."""
    strategy = strategies.build(choices.strategy, choices.settings)
    config = RunConfig(
        recipe=recipe_name,
        strategy=choices.strategy,
        settings=strategies.resolved(strategy),
        workers=choices.workers,
        epochs=recipe.epochs if choices.epochs is None else choices.epochs,
        batch_size=recipe.batch_size if choices.batch_size is None else choices.batch_size,
        seed=choices.seed,
        data=None if choices.data is None else str(choices.data.absolute()),
        save_every=choices.save_every,
        resume=choices.resume,
        device=choices.device,
        profile=choices.profile,
        shuffle=choices.shuffle,
    )
    if recipe.locate is not None:
        recipe.locate(choices.data)
    return config


def versions() -> dict[str, str]:
    """Versions of what decides the numbers, without importing any of it."""
    found = {"python": platform.python_version()}
    for package in ("thinwire", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def write_config(run: Path, config: RunConfig | Mapping[str, object]) -> None:
    """Keep the configuration, and what it ran on, in the run folder."""
    content = {
        "config": asdict(config) if isinstance(config, RunConfig) else dict(config),
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "command": sys.argv,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    (run / FILE).write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def read_config(run: Path) -> RunConfig:
    """The configuration kept in a run folder."""
    path = run / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return RunConfig(**content["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
