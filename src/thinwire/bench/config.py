"""What a benchmark is to measure, as values, and the folder it goes into; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.errors import check
from thinwire.hosts.rates import check_rate
from thinwire.lab.nets import parse_net

FILE = "bench.json"
RUNS = "runs"
"""The folder in a bench folder that holds the run folders of its studies."""
REFERENCE_NET = "params=5e6,layers=16,forward=0.1,backward=0.2"
SMALL_NET = "params=1.25e6,layers=16,forward=0.1,backward=0.2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A recipe trained by every system, to see how long each takes to what exact SGD reaches."""

    recipe: str
    workers: int = 4
    rate_bits_per_s: float
    epochs: int
    batch_size: int | None = None
    """Of one worker; None: the recipe's."""
    samples: int | None = None
    """Trained on the first so many samples only, and judged by a quarter as many; None: on all."""
    evaluate_every: int
    """Steps; how finely the time to the target is known."""
    minutes: float
    """No further system is begun after these."""
    data: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """The grid, the studies, and the time they may take."""

    workers: tuple[int, ...]
    rates_bits_per_s: tuple[float, ...]
    nets: tuple[str, ...]
    """As `thinwire lab run --emulate` takes them."""
    systems: tuple[str, ...] = ()
    """Names; the ceiling is always among them."""
    rivals: str | None = None
    """The module they come from."""
    scale: float = 1.0
    """Shrinks nets and rates together."""
    turns: int
    """At most so many blocks per system and cell,"""
    minutes: float
    """as far as the time allows: the first turn is always completed."""
    block_s: float
    """How long a block is timed, at least two steps."""
    studies: tuple[Study, ...]

    def __post_init__(self) -> None:
        for count in self.workers:
            check(2 <= count <= 64, "workers", "2 to 64", count)
        for rate in self.rates_bits_per_s:
            check_rate(rate)
        for net in self.nets:
            parse_net(net, scale=self.scale)
        check(self.turns >= 1, "turns", "at least 1", self.turns)
        check(self.minutes > 0, "minutes", "above 0", self.minutes)


STANDARD = BenchConfig(
    workers=(2, 4, 8, 16),
    rates_bits_per_s=(50e6, 200e6, 1e9),
    nets=(SMALL_NET, REFERENCE_NET),
    turns=3,
    minutes=45,
    block_s=1.2,
    studies=(
        Study(
            recipe="mnist-cnn",
            rate_bits_per_s=100e6,
            epochs=1,
            samples=20_000,
            evaluate_every=15,
            minutes=5,
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
    studies=(Study(recipe="digits-cnn", rate_bits_per_s=100e6, epochs=8, evaluate_every=8, minutes=2.2),),
)


def run_folder(bench: Path, study: Study, system: str) -> Path:
    """The run folder of one system in one study."""
    return bench / RUNS / f"{study.recipe}-{system}".replace(":", "-").replace("=", "-")


def write(folder: Path, config: BenchConfig, more: Mapping[str, Any]) -> None:
    """Keep the configuration, and where its numbers come from."""
    content = {"config": asdict(config), **more}
    (folder / FILE).write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def read(folder: Path) -> BenchConfig:
    """The configuration kept in a bench folder."""
    config = json.loads((folder / FILE).read_text(encoding="utf-8"))["config"]
    studies = tuple(Study(**study) for study in config.pop("studies"))
    lists = {key: tuple(value) for key, value in config.items() if isinstance(value, list)}
    return BenchConfig(**{**config, **lists}, studies=studies)
