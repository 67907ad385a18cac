"""Where a number comes from: code, versions, hardware, and how busy the machine was."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
TRIALS = ROOT / "runs" / "benchmarks"
"""Where runs go that only show that a script works; git ignores it."""


def provenance() -> dict[str, Any]:
    """Everything about this run that is not its own config or data."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").splitlines(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "processor": _line("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory": _line("/proc/meminfo", "MemTotal"),
        "load_average": os.getloadavg(),
    }


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


def _git(*arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()


def _line(path: str, key: str) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")
