"""The worlds that other tests run in: a worker that ends badly is told, and harms no later one."""

from __future__ import annotations

import atexit
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.scripts import run_script
from tests.worlds import Processes, run_processes

pytestmark = pytest.mark.processes


def total() -> float:
    ranks = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(ranks)
    return ranks.item()


def end_with_3() -> None:
    atexit.register(os._exit, 3)


def read_environment() -> str | None:
    return os.environ.get("THINWIRE_TEST")


def end_by(kind: str) -> None:
    if kind == "raise":
        raise ArithmeticError("the batch was bad")
    os.kill(os.getpid(), signal.SIGKILL)


def test_every_job_has_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_processes(3, total) == [3.0, 3.0, 3.0]
    monkeypatch.setenv("THINWIRE_TEST", "now")
    assert run_processes(2, read_environment) == ["now", "now"]


@pytest.mark.parametrize(
    ("kind", "told"), [("raise", "ArithmeticError: the batch was bad"), ("kill", "died")]
)
def test_a_worker_that_ends_badly_is_told(kind: str, told: str) -> None:
    processes = Processes(1, end_by, kind)
    try:
        assert processes.outcome(0, 60) == (False, told)
    finally:
        processes.kill()
    assert run_processes(2, total) == [1.0, 1.0]


def test_a_process_that_fails_after_its_work_is_noticed() -> None:
    with pytest.raises(AssertionError, match="worker 0: exit code 3 after its work was done"):
        run_processes(1, end_with_3)


def test_a_script_runs_with_and_without_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(__name__, os.environ.get('RANK'))\n")
    assert run_script(script) == ["__main__ None\n"]
    assert run_script(script, workers=2) == ["__main__ 0\n", "__main__ 1\n"]
    script.write_text("raise SystemExit(4)")
    with pytest.raises(AssertionError, match="SystemExit: 4"):
        run_script(script)
