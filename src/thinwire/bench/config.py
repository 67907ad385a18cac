"""The configuration of a benchmark, its folder, and the provenance of its numbers; no torch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.errors import check
from thinwire.hosts.quantities import LONGEST_S, check_rate
from thinwire.lab.nets import parse_net
from thinwire.recipes.config import versions

FILE = "bench.json"
RUNS = "runs"
"""The part of a bench folder that holds the run folders of its studies."""
REFERENCE_NET = "params=5e6,layers=16,forward=0.1,backward=0.2"
MOST_TURNS = 1_000
SMALL_NET = "params=1.25e6,layers=16,forward=0.1,backward=0.2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """One recipe, trained by every system to the accuracy that exact SGD reaches."""

    recipe: str
    workers: int = 4
    rate_bits_per_s: float
    epochs: int
    batch_size: int | None = None
    """Samples per step and worker; None: the recipe's."""
    samples: int | None = None
    """Number of samples trained on, the first ones, and four times the number tested on; None: all."""
    evaluate_every: int
    """Number of steps; the resolution of the time to the target."""
    minutes: float
    """No further system is started after these."""
    data: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """The grid, the studies, and the time they may take."""

    workers: tuple[int, ...]
    rates_bits_per_s: tuple[float, ...]
    nets: tuple[str, ...]
    """In the grammar of `thinwire lab run --emulate`."""
    systems: tuple[str, ...] = ()
    """Names; the ceiling is always among them."""
    rivals: str | None = None
    """The module that rivals come from."""
    scale: float = 1.0
    """Shrinks nets and rates together."""
    turns: int
    """Most blocks per system and cell."""
    minutes: float
    """Time for all turns; the first turn is completed in any case."""
    block_s: float
    """Timed seconds of a block, at least two steps."""
    studies: tuple[Study, ...]

    def __post_init__(self) -> None:
        for count in self.workers:
            check(2 <= count <= 64, "workers", "2 to 64", count)
        for rate in self.rates_bits_per_s:
            check_rate(rate)
        for net in self.nets:
            parse_net(net, scale=self.scale)
        check(1 <= self.turns <= MOST_TURNS, "turns", f"1 to {MOST_TURNS:,}", self.turns)
        check(0 < self.minutes <= LONGEST_S / 60, "minutes", "above 0 and at most a year", self.minutes)


STANDARD = BenchConfig(
    workers=(2, 4, 8, 16),
    rates_bits_per_s=(50e6, 200e6, 1e9),
    nets=(SMALL_NET, REFERENCE_NET),
    turns=3,
    minutes=45,
    block_s=1.2,
    studies=(
        Study(
            recipe="mnist-cnn", rate_bits_per_s=100e6, epochs=1, samples=20_000, evaluate_every=15, minutes=5
        ),
        Study(
            recipe="cifar-resnet20",
            rate_bits_per_s=100e6,
            epochs=2,
            batch_size=32,
            samples=4_000,
            evaluate_every=8,
            minutes=8,
        ),
    ),
)
QUICK = replace(
    STANDARD,
    workers=(4,),
    rates_bits_per_s=(200e6,),
    nets=(SMALL_NET,),
    minutes=1.7,
    block_s=1.5,
    studies=(Study(recipe="digits-cnn", rate_bits_per_s=50e6, epochs=6, evaluate_every=6, minutes=2.5),),
)
DEMO = replace(
    QUICK,
    workers=(),
    studies=(Study(recipe="digits-wide", rate_bits_per_s=400e6, epochs=8, evaluate_every=46, minutes=2.5),),
)


def run_folder(bench: Path, study: Study, system: str) -> Path:
    return bench / RUNS / f"{study.recipe}-{system}".replace(":", "-").replace("=", "-")


def write(folder: Path, config: BenchConfig, more: Mapping[str, Any]) -> None:
    """Write the configuration and the provenance of the numbers."""
    content = {"config": asdict(config), **more}
    (folder / FILE).write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def read(folder: Path) -> BenchConfig:
    config = json.loads((folder / FILE).read_text(encoding="utf-8"))["config"]
    studies = tuple(Study(**study) for study in config.pop("studies"))
    lists = {key: tuple(value) for key, value in config.items() if isinstance(value, list)}
    return BenchConfig(**{**config, **lists}, studies=studies)


def provenance() -> dict[str, Any]:
    """Everything about a measurement that is not its own config or data."""
    return {
        "command": [Path(part).name if part.startswith("/") else part for part in sys.argv],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").splitlines(),
        **versions(),
        "kernel": platform.release(),
        "processor": _line("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory": _line("/proc/meminfo", "MemTotal"),
        "load_average": os.getloadavg(),
    }


def _git(*arguments: str) -> str:
    """Git's answer about the checkout of this package; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _line(path: str, key: str) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")
