"""`thinwire train --elastic`: a worker dies, another one joins, and the run reaches its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import end, environment, is_training, started, wait_for, worker_pids
from tests.patience import HANGS_S
from thinwire.event_log import read_events
from thinwire.events import Evaluated, Progress, RunEnded

pytestmark = pytest.mark.processes
ARGUMENTS = ("train", "faulty:until_told", "--elastic", "--workers", "3", "--json", "--out")


def test_a_worker_dies_and_another_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, go = tmp_path / "run", tmp_path / "go"
    monkeypatch.setenv("THINWIRE_TEST_GO", str(go))
    with started(*ARGUMENTS, str(run), "--oversubscribe") as process:
        wait_for(lambda: is_training(run, 3), process)
        pids = worker_pids(run)
        os.kill(pids[0], signal.SIGKILL)  # which had the store
        address = re.findall(r"worker [12] of 3 listens on (\S+)", (run / "workers.log").read_text())[0]
        joins = {"THINWIRE_JOIN": address, "THINWIRE_KEY_FILE": str(run / "run.key")}
        command = [sys.executable, "-m", "thinwire", *ARGUMENTS, str(run)]
        with subprocess.Popen(
            command, env={**environment(), **joins}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as joiner:
            try:
                wait_for(lambda: has_stepped(run, 3), joiner)
                go.touch()
                output, errors = process.communicate(timeout=HANGS_S)
                joined = joiner.communicate(timeout=HANGS_S)
            finally:
                end([*pids.values(), joiner.pid])
    assert (process.returncode, joiner.returncode) == (0, 0), errors + joined[1]
    result = json.loads(output)
    assert result["workers"] == 3
    assert f"worker 0 was killed by SIGKILL (pid {pids[0]}); the others went on" in errors
    events = read_events(run)
    assert sorted(each.rank for each in events if isinstance(each.record, RunEnded)) == [1, 2, 3]
    assert [each.record.epoch for each in events if isinstance(each.record, Evaluated)] == list(range(1, 9))
    assert joined[0] == ""  # the result is told once


def has_stepped(run: Path, number: int) -> bool:
    return any(isinstance(each.record, Progress) and each.rank == number for each in read_events(run))
