"""Where a number comes from: code, versions, hardware, and how busy the machine was; no torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from thinwire.recipes.config import versions


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
    """What git says about the checkout this package is in; nothing if it is in none."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _line(path: str, key: str) -> str:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "unknown")
