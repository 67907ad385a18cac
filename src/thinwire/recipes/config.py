"""A run's configuration, fully resolved, and the file that keeps it next to the results."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from thinwire.checked_json import parse_json
from thinwire.errors import DataError, check, check_one_of
from thinwire.events import RunStarted
from thinwire.files import read_regular
from thinwire.hosts.quantities import MOST
from thinwire.recipes import registry
from thinwire.strategies import registry as strategies

FILE = "config.json"
MOST_BYTES = 1 << 26
MOST_EPOCHS = 1_000_000
MOST_SAMPLES = 1_000_000
"""Largest number of samples of one worker in one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The complete configuration of a run, as every worker receives it."""

    recipe: str
    strategy: str
    settings: Mapping[str, object]
    """Settings of the strategy, defaults included."""
    workers: int
    epochs: int
    batch_size: int
    """Samples per worker and step."""
    seed: int = 0
    data: str | None = None
    """The folder named with --data."""
    save_every: int = 0
    """Steps between two checkpoints; 0: none are saved."""
    resume: bool = False
    """Whether to resume from the newest checkpoint in the run folder."""
    device: str = "auto"
    """The device: "cpu", "cuda", or "auto" for cuda where there is one."""
    profile: bool = False
    """Whether each worker writes a trace of a few steps."""
    evaluate_every: int = 0
    """Steps between two evaluations, beside those at the end of every epoch; 0: only those."""
    shuffle: str = "dealt"
    """Who trains on which samples: "dealt" out anew in every epoch, each worker having all of them; its "own"
    part, shuffled by itself; or its own part, whose samples travel in a "ring"."""

    apoptosis: str = ""
    """How the network shrinks while it trains, as `MODE:KEY=VALUE`; empty: it does not."""
    elastic: bool = False
    """Whether training goes on when workers die, come back or join."""

    def __post_init__(self) -> None:
        check_one_of("device", self.device, ("auto", "cpu", "cuda"))
        check_one_of("shuffle", self.shuffle, ("dealt", "own", "ring"))
        for name, most in (("workers", MOST), ("epochs", MOST_EPOCHS), ("batch_size", MOST_SAMPLES)):
            value = getattr(self, name)
            check(1 <= value <= most, name.replace("_", " "), f"1 to {most:,}", value)
        for name in ("save_every", "evaluate_every"):
            check(getattr(self, name) >= 0, name.replace("_", " "), "0 or more steps", getattr(self, name))
        check(0 <= self.seed < 2**63, "seed", "from 0 to 2**63 - 1", self.seed)
        if self.elastic:
            check(self.shuffle == "dealt", "shuffle", "'dealt' where training is elastic", self.shuffle)
            for name in ("save_every", "resume", "profile", "apoptosis"):
                value = getattr(self, name)
                check(not value, name.replace("_", " "), "left out where training is elastic", value)


def resolve(
    recipe: str,
    strategy: str,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    data: Path | None = None,
    **others: Any,
) -> RunConfig:
    """Complete a user's choices, with `strategy` as on the command line; wrong ones are refused here."""
    found = registry.get(recipe)
    name, settings = strategies.parse(strategy)
    config = RunConfig(
        recipe=recipe,
        strategy=name,
        settings=strategies.resolved(strategies.build(name, settings)),
        epochs=found.epochs if epochs is None else epochs,
        batch_size=found.batch_size if batch_size is None else batch_size,
        data=None if data is None else str(data.absolute()),
        **others,
    )
    if config.apoptosis:
        from thinwire.apoptosis.settings import parse  # which imports torch

        parse(config.apoptosis)
    if found.locate is not None:  # missing data is reported here, not by every worker
        found.locate(data)
    return config


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers, without importing them."""
    found = dict.fromkeys(("thinwire", "torch", "numpy"), "unknown")
    for package in found:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {"python": platform.python_version(), **found}


def _plain(config: RunConfig | Mapping[str, object]) -> dict[str, object]:
    return asdict(config) if isinstance(config, RunConfig) else dict(config)


def run_started(config: RunConfig | Mapping[str, object], world_size: int, host: str = "") -> RunStarted:
    """Make a worker's first record; `host` is this machine unless it is named."""
    return RunStarted(
        config=_plain(config),
        versions=versions(),
        host=host or socket.gethostname(),
        pid=os.getpid(),
        world_size=world_size,
    )


def write_config(run: Path, config: RunConfig | Mapping[str, object], name: str = FILE) -> None:
    """Write the configuration, and what it ran on, into a file of the run folder."""
    content = {
        "config": _plain(config),
        "versions": versions(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "command": sys.argv,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    (run / name).write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def read_config(run: Path, name: str = FILE) -> RunConfig:
    try:
        return RunConfig(**parse_json(read_regular(run / name, MOST_BYTES))["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{run / name} cannot be read: {error}") from error
