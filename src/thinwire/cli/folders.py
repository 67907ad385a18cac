"""Where a command puts its results: the folder asked for, or a new one below runs/."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from thinwire.errors import SettingError


def results_folder(
    out: Path | None, name: str, *, may_hold: Callable[[Path], bool] = lambda folder: False, hint: str = ""
) -> Path:
    """An empty folder, unless it may hold what it holds; by default named by what and when."""
    if out is None:
        name = f"{name.replace(':', '-').replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
        candidates = [Path("runs") / name] + [Path("runs") / f"{name}-{n}" for n in range(2, 100)]
        out = next(path for path in candidates if not path.exists())
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()) and not may_hold(out):
            raise SettingError(f"--out must be a new or empty folder, and {out} is not empty", hint=hint)
    except OSError as error:
        raise SettingError(
            f"--out must be a folder that can be written to, {out} is not: {error.strerror}"
        ) from None
    return out
