"""`thinwire train --save-every --resume` as a user runs it: killed, gone on with, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.command import alive, end, started, thinwire, wait_for, worker_pids
from tests.recipes.killing import common
from thinwire.engine import folders

pytestmark = pytest.mark.processes

OPTIONS = ["train", "digits-cnn", "--workers", "2", "--epochs", "2", "--save-every", "5"]
NUM_STEPS = 90


def test_killed_and_resumed_it_ends_as_if_nothing_had_been(tmp_path: Path) -> None:
    """And what is then done to its checkpoints is noticed, and touched by nobody."""
    done = thinwire(*OPTIONS, "--out", str(tmp_path / "whole"))
    assert done.returncode == 0, done.stderr
    run = killed_on_the_way(tmp_path)
    done = thinwire(*OPTIONS, "--out", str(run), "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == NUM_STEPS
    ours, theirs = final(run), final(tmp_path / "whole")
    assert all(torch.equal(weight, ours["model"][name]) for name, weight in theirs["model"].items())
    assert ours["schedule"] == theirs["schedule"]

    refused(run, "is of another training: seed was 0, here it is 3", "--seed", "3")
    newest, older = sorted((run / "checkpoints").iterdir(), reverse=True)
    manifest = newest / "manifest.json"
    original = manifest.read_text()
    manifest.write_text(original.replace('"format": 2', '"format": 3'))
    refused(run, f"{manifest} has format 3, and this version of thinwire reads format 2")
    manifest.write_text(original)
    victim = newest / "common.safetensors"
    victim.write_bytes(victim.read_bytes()[:-1])
    assert f"to go on from {older.name}" in refused(run, f"{newest} is damaged: common.safetensors has")


def killed_on_the_way(folder: Path) -> Path:
    """A run that has saved and not ended; tried again if training was faster than the kill."""
    for attempt in range(5):
        run = folder / f"killed-{attempt}"
        kill_after_a_save(run)
        if folders.read_manifest(folders.whole(run / "checkpoints")[-1]).step < NUM_STEPS:
            return run
    raise AssertionError("training always ends before it can be killed")


def kill_after_a_save(run: Path) -> None:
    with started(*OPTIONS, "--out", str(run)) as process:
        wait_for(lambda: bool(folders.whole(run / "checkpoints")), process)
        process.kill()
        process.communicate(timeout=500)
        pids = list(worker_pids(run).values())
        try:
            wait_for(lambda: not any(alive(pid) for pid in pids), process)
        finally:
            end(pids)


def final(run: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The state that all workers share at the end of a run."""
    newest = folders.whole(run / "checkpoints")[-1]
    assert folders.read_manifest(newest).step == NUM_STEPS
    return common(newest)


def refused(run: Path, why: str, *options: str) -> str:
    """Resume, see it refused in one line and nothing changed; the hint."""
    before = kept(run)
    alone = ["--workers", "1"]  # which may differ, and starts faster
    done = thinwire(*OPTIONS, *alone, "--out", str(run), "--resume", *options)
    assert done.returncode == 1
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert why in errors[0]
    assert "Traceback" not in done.stderr
    assert before == kept(run)
    return next((line for line in done.stderr.splitlines() if line.startswith("hint: ")), "")


def kept(run: Path) -> dict[Path, bytes]:
    """What a run that is refused must leave alone."""
    paths = [run / "config.json", *(run / "checkpoints").rglob("*")]
    return {path: path.read_bytes() for path in paths if path.is_file()}
