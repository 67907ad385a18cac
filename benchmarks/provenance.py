"""What the scripts here share: workers to measure with, and a file for the result and where it comes from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thinwire.bench.provenance import provenance

__all__ = ["RESULTS", "provenance", "run_workers", "save"]

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TRIALS = ROOT / "runs" / "benchmarks"
"""Where runs go that only show that a script works; git ignores it."""


def run_workers(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(*args)` in local processes started by torch's own launcher; results in order of rank."""
    os.environ["OMP_NUM_THREADS"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id="benchmark",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
    )
    results: dict[int, Any] = elastic_launch(config, work)(*args)
    return [results[rank] for rank in range(world_size)]


def save(name: str, result: dict[str, Any], *, trial: bool) -> Path:
    folder = TRIALS if trial else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        path = folder / f"{stem}{suffix}.json"
        try:
            with path.open("x") as file:  # two that end in the same second both stay
                file.write(json.dumps(result, indent=1) + "\n")
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"too many results called {stem} in {folder}")
