"""A Chrome trace of a few steps, with what the wire's threads do beside training."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

NUM_STEPS = 5
"""Steps in a trace."""
SKIPPED = 10
"""Steps before it, in a run that is long enough: the first ones are slow and not like the others."""


@contextmanager
def profiling(path: Path | None, num_steps: int, device: torch.device) -> Iterator[Callable[[], object]]:
    """Call what this yields after every step; a few of them are written to `path` (None: nothing is)."""
    if path is None:
        yield lambda: None
        return
    # one step warms the profiler up, in which it records and throws away
    num_recorded = max(1, min(NUM_STEPS, num_steps - 1))
    plan = schedule(
        wait=max(0, min(SKIPPED, num_steps - num_recorded - 1)), warmup=1, active=num_recorded, repeat=1
    )
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))
        name_threads(path)

    with profile(
        activities=activities, schedule=plan, on_trace_ready=write, experimental_config=_all_threads()
    ) as profiler:
        yield profiler.step


def name_threads(path: Path) -> None:
    """Give the rows of a trace of this process the names its threads have in Python."""
    content = json.loads(path.read_text(encoding="utf-8"))
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    events = content["traceEvents"]
    kept = [e for e in events if not (e.get("name") == "thread_name" and e.get("tid") in names)]
    content["traceEvents"] = kept + [
        {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": tid, "args": {"name": name}}
        for tid, name in names.items()
    ]
    path.write_text(json.dumps(content), encoding="utf-8")


def _all_threads() -> Any:
    """Without this the profiler sees only the thread that starts it, and all communication is in others."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
