"""`thinwire train` as a user runs it, with real workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import alive, end, environment, is_training, started, thinwire, wait_for, worker_pids
from tests.data.make import write_text
from tests.patience import HANGS_S
from thinwire.event_log import read_events
from thinwire.events import Evaluated, Failed, RunEnded

pytestmark = pytest.mark.processes


def test_default_recipe_reaches_its_target_on_four_workers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = thinwire("train", "--out", str(run), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["recipe"] == "digits-cnn"
    assert result["workers"] == 4
    assert result["value"] >= 0.97
    assert result["reached"] is True
    assert result["sent_bytes_per_step"] > 0
    assert 0 < result["exposed_share"] < 1
    assert "epoch 20/20" in done.stderr
    assert "Traceback" not in done.stderr
    events = read_events(run)
    assert sorted(event.rank for event in events if isinstance(event.record, RunEnded)) == [0, 1, 2, 3]
    assert [e.record.epoch for e in events if isinstance(e.record, Evaluated)] == list(range(1, 21))
    config = json.loads((run / "config.json").read_text())
    assert config["config"]["settings"] == {"overlap": "backward"}
    assert config["versions"]["torch"]


def test_one_silent_worker_sends_nothing_and_summary_is_readable(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = thinwire("train", "--workers", "1", "--strategy", "silent", "--epochs", "1", "--out", str(run))
    assert done.returncode == 0, done.stderr
    assert "one worker: nothing is sent, so silent trains as any other strategy would" in done.stderr
    assert "sent      0 B per step and worker, 0 B in all" in done.stdout
    assert "accuracy" in done.stdout
    assert "missed" in done.stdout  # one epoch is not enough
    assert str(run) in done.stdout


def test_nan_names_worker_host_and_step(tmp_path: Path) -> None:
    done = thinwire("train", "faulty:nan_loss", "--workers", "2", "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    title, *_, error, hint = done.stderr.splitlines()  # a slow machine shows progress in between
    assert title.startswith("faulty:nan_loss")
    assert error.startswith("error: worker 1 on ")
    assert "the loss is nan at step 20" in error
    assert hint.startswith("hint: ")
    assert done.stdout == ""


def test_bug_in_a_recipe_is_one_error_and_points_to_the_traceback(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = thinwire("train", "faulty:crash", "--workers", "2", "--out", str(run))
    assert done.returncode == 1
    assert "error: worker 1 on " in done.stderr
    assert "ZeroDivisionError: a bug of the user's" in done.stderr
    assert "Traceback" not in done.stderr
    assert f"hint: the traceback is in {run / 'workers.log'}" in done.stderr
    assert "Traceback" in (run / "workers.log").read_text()


def test_killed_worker_is_named_and_nobody_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started("train", "faulty:endless", "--workers", "3", "--out", str(run)) as process:
        wait_for(lambda: is_training(run, 3), process)
        pids = worker_pids(run)
        try:
            subprocess.run(["kill", "-9", str(pids[2])], check=True)
            _, stderr = process.communicate(timeout=HANGS_S)
            assert process.returncode == 1
            assert "error: worker 2 on " in stderr
            assert f"was killed by SIGKILL (pid {pids[2]})" in stderr
            told = [event for event in read_events(run) if isinstance(event.record, Failed)]
            assert 2 in {event.rank for event in told}
            assert thinwire("report", str(run)).returncode == 0
            assert f"was killed by SIGKILL (pid {pids[2]})" in (run / "report.html").read_text()
            assert not any(alive(pid) for pid in pids.values())
        finally:
            end(list(pids.values()))


def test_frozen_worker_is_named_and_nobody_is_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started("train", "faulty:endless", "--workers", "2", "--out", str(run)) as process:
        wait_for(lambda: is_training(run, 2), process)
        pids = worker_pids(run)
        try:
            subprocess.run(["kill", "-STOP", str(pids[1])], check=True)
            _, stderr = process.communicate(timeout=HANGS_S)
            assert process.returncode == 1
            assert "error: worker 1 on " in stderr
            assert "no sign of life" in stderr
            assert not any(alive(pid) for pid in pids.values())
        finally:
            end(list(pids.values()))


def test_interrupt_ends_everything(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started("train", "faulty:endless", "--workers", "2", "--out", str(run)) as process:
        wait_for(lambda: is_training(run, 2), process)
        pids = worker_pids(run)
        try:
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=HANGS_S)
            assert process.returncode == 130
            assert "interrupted" in stderr
            assert "Traceback" not in stderr
            assert not any(alive(pid) for pid in pids.values())
        finally:
            end(list(pids.values()))


def test_killed_command_leaves_no_orphans(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started("train", "faulty:endless", "--workers", "2", "--out", str(run)) as process:
        wait_for(lambda: is_training(run, 2), process)
        pids = list(worker_pids(run).values())
        launcher = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        try:
            process.kill()
            process.communicate(timeout=HANGS_S)
            wait_for(lambda: not any(alive(pid) for pid in [*pids, launcher]), process)
        finally:
            end([*pids, launcher])


def test_under_torchrun_it_is_a_worker(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "thinwire", "train", "--epochs", "2", "--json", "--out", str(run)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["workers"] == 2
    assert sorted(worker_pids(run)) == [0, 1]
    assert "epoch 2/2" in done.stderr


def test_trace_and_curves_of_a_language_model_on_two_workers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    write_text(tmp_path / "data", num_train=700, num_test=200)
    run = tmp_path / "run"
    options = ["--data", str(tmp_path / "data"), "--workers", "2", "--batch-size", "1", "--epochs", "1"]
    done = thinwire("train", "ptb-lstm", *options, "--profile", "--tensorboard", "--out", str(run))
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    assert sorted(path.name for path in (run / "tensorboard").iterdir()) == ["worker-0", "worker-1"]
    for rank in (0, 1):
        events = json.loads((run / f"trace-worker-{rank}.json").read_text())["traceEvents"]
        thread = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        seen = {(e["name"], thread.get(e["tid"], "")) for e in events if e.get("ph") == "X"}
        assert ("thinwire::reduce", "MainThread") in seen
        assert any(name == "thinwire::wire" and where.startswith("thinwire-lane") for name, where in seen)
