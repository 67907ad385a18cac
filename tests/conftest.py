"""Fixtures that keep tests honest: nothing is left running, and the environment is as it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import tests.patience  # noqa: F401 (loads the profile of hypothesis)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, so before any test does
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what tests start must hear of it
torch.set_num_threads(1)  # workers are threads or processes: more than one each only gets in the way

# Threads a library keeps for the life of the process.
_KEPT = ("ThreadPoolExecutor", "pydevd", "asyncio_", "QueueFeederThread")


def _strays(before: set[int]) -> list[str]:
    threads = [
        t.name for t in threading.enumerate() if t.ident not in before and not t.name.startswith(_KEPT)
    ]
    return threads + [f"process {p.pid}" for p in multiprocessing.active_children()]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves threads, processes or environment variables behind."""
    before = {t.ident for t in threading.enumerate() if t.ident is not None}
    environment = dict(os.environ)
    yield
    deadline = time.monotonic() + 60
    while (strays := _strays(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    changed = {k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)}
    os.environ.clear()
    os.environ.update(environment)
    changed = {name for name in changed if not name.startswith(("PYTEST_", "KMP_", "TORCHINDUCTOR_"))}
    assert not strays, f"left running: {strays}"
    assert not changed, f"environment changed: {changed}"


@pytest.fixture(autouse=True)
def leaves_no_files() -> Iterator[None]:
    """Fail a test that writes into the folder it is run from."""
    before = set(os.listdir("."))
    yield
    caches = {
        ".pytest_cache",
        ".hypothesis",
        ".mypy_cache",
        ".ruff_cache",
    }  # of tools, started beside the tests
    made = set(os.listdir(".")) - before - caches - {"runs"}
    assert not made, f"left in the working folder: {made}"
