"""The launcher of local workers; how a run ends is tested through the command line too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_view import progress
from thinwire.errors import SettingError
from thinwire.event_log import EventReader
from thinwire.recipes import follow
from thinwire.recipes.config import read_config, resolve
from thinwire.recipes.follow import RunState, written
from thinwire.recipes.launch import LocalWorkers, WorkerFailure, environment


def test_cores_are_shared_out_unless_the_user_has_decided() -> None:
    assert environment({}, 1)["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert environment({}, 1000)["OMP_NUM_THREADS"] == "1"
    assert environment({"OMP_NUM_THREADS": "3", "HOME": "/x"}, 2)["OMP_NUM_THREADS"] == "3"
    assert environment({"HOME": "/x"}, 2)["HOME"] == "/x"


def test_a_worker_ends_when_its_lifeline_does() -> None:
    code = "import time; from thinwire.recipes.worker import hold_on_to; hold_on_to(0); time.sleep(60)"
    read_end, write_end = os.pipe()
    with subprocess.Popen([sys.executable, "-c", code], stdin=read_end) as process:
        os.close(read_end)
        os.close(write_end)
        assert process.wait(timeout=30) == 130


WORKER = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[2:])
if os.environ["RANK"] == "1":
    {end}
"""


def launched(run: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> tuple[int, LocalWorkers]:
    """Start two workers, the second of which ends by `end`; the launcher's status."""
    (run / "ending_worker.py").write_text(WORKER.format(end=end))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(run), os.environ.get("PYTHONPATH", "")]))
    with LocalWorkers(run, 2, module="ending_worker", arguments=["more"]) as workers:
        deadline = time.monotonic() + 60
        while (status := workers.poll()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    return status, workers


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "status", "how"),
    [
        ("pass", 0, None),
        ("sys.exit(3)", 1, "ended with status 3"),
        ("os.kill(os.getpid(), 9)", 1, "was killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_known(
    end: str, status: int, how: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, workers = launched(tmp_path, monkeypatch, end)
    assert ended == status, workers.log.read_text()
    assert sorted(workers.log.read_text().splitlines())[-2:] == [
        "rank 0 of 2 ['more']",
        "rank 1 of 2 ['more']",
    ]
    failure = workers.failure
    assert (failure and failure.how) == how
    assert failure is None or failure.rank == 1
    assert not (tmp_path / "launcher").exists()


class _Waiting:
    """Elastic workers of which one has died, and the others are there."""

    end_together = False
    failure = WorkerFailure(1, 4711, -9)

    def __init__(self) -> None:
        self.worker_pids: set[int] = set()

    def poll(self) -> None:
        return None


@pytest.mark.parametrize("begun", [False, True])
def test_an_elastic_run_ends_if_a_worker_dies_before_the_first_step(
    begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since the others would wait for it."""
    monkeypatch.setattr(follow, "START_GRACE_S", 0.2)
    state = RunState(2)
    if begun:
        state.progress[0] = progress(1)
    workers: Any = _Waiting()
    status = follow.follow(workers, EventReader(tmp_path), state, limit_s=1.0)
    assert status == (follow.TIMED_OUT if begun else 1)


def test_failures_are_put_into_words() -> None:
    assert WorkerFailure(0, 42, -15).how == "was killed by SIGTERM"
    assert WorkerFailure(0, 42, -99).how == "was killed by signal 99"


@pytest.mark.parametrize("resumed", [False, True])
def test_the_configuration_is_replaced_when_a_run_was_resumed(tmp_path: Path, resumed: bool) -> None:
    """Not before: whoever kills the command of a resume that would be refused finds the earlier one."""
    first, second = (resolve("digits-cnn", "all-reduce", workers=workers) for workers in (2, 3))
    state = RunState(2)

    def resume() -> None:
        with written(tmp_path, second, state) as name:
            assert read_config(tmp_path, name).workers == 3
            assert read_config(tmp_path).workers == 2
            if resumed:
                state.progress[0] = progress(1)
            raise SettingError("the checkpoint is of another training, or something else is wrong later")

    with written(tmp_path, first, state) as name:
        assert name == "config.json"
    with pytest.raises(SettingError):
        resume()
    assert read_config(tmp_path).workers == (3 if resumed else 2)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
