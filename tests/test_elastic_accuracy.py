"""`benchmarks.elastic_accuracy`: what is kept of trainings that were cut off, and what is trained again."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import elastic_accuracy
from benchmarks.common import RESULTS
from benchmarks.elastic_accuracy import ElasticTask, add_run, parse, print_table, read_runs, tasks, train

TASK = ElasticTask(recipe="digits-cnn", disturbed=True, seed=0, epochs=3, device="cpu", threads=1, data=None)


def run_of(task: ElasticTask, values: list[float], **more: Any) -> dict[str, Any]:
    return {
        "recipe": task.recipe,
        "disturbed": task.disturbed,
        "seed": task.seed,
        "epochs": task.epochs,
        "device": task.device,
        "values": values,
        **more,
    }


def test_a_training_that_is_cut_off_keeps_its_curve_and_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    cut = train(TASK, path, time.monotonic())
    assert cut["unfinished"]
    (kept,) = read_runs(path)
    assert kept["unfinished"]
    assert len(kept["values"]) == 1
    given = ["--recipe", "digits-cnn", "--epochs", "3", "--seeds", "0", "--only", "disturbed"]
    options = parse([*given, "--device", "cpu", "--out", str(path)])
    assert tasks(options) == [TASK]
    whole = train(TASK, path, time.monotonic() + 1000)
    (kept,) = read_runs(path)
    assert kept["values"] == whole["values"]
    assert kept["values"][0] == cut["values"][0]
    assert "unfinished" not in kept
    assert len(kept["happened"]) == 8
    assert tasks(options) == []


def test_of_two_unfinished_curves_the_longer_is_kept_and_a_whole_one_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    add_run(path, run_of(TASK, [1.0, 2.0], unfinished=True))
    add_run(path, run_of(TASK, [3.0], unfinished=True))
    add_run(path, run_of(replace(TASK, device="cuda"), [9.0], unfinished=True))
    assert [run["values"] for run in read_runs(path)] == [[1.0, 2.0], [9.0]]
    add_run(path, run_of(TASK, [4.0, 5.0, 6.0]))
    add_run(path, run_of(TASK, [4.0, 5.0, 6.0, 7.0], unfinished=True))
    assert [run["values"] for run in read_runs(path)] == [[9.0], [4.0, 5.0, 6.0]]
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_the_table_has_whole_pairs_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    plain = replace(TASK, disturbed=False)
    runs = [run_of(TASK, [1.0, 90.0]), run_of(plain, [2.0, 92.0])]
    print_table([*runs, run_of(replace(plain, seed=1), [50.0], unfinished=True)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        "| digits-cnn | 3 | cpu | 0 | 92.0 | 90.0 |",
        "| digits-cnn | 3 | cpu | mean | 92.00 | 90.00 |",
        "unfinished: digits-cnn, cpu, seed 1, undisturbed: 50.0 % after 1 of 3 epochs",
    ]


def test_nothing_is_begun_that_has_no_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deadline_s = time.monotonic() + elastic_accuracy.LEAST_S - 1
    assert elastic_accuracy.train_all([TASK], tmp_path / "result.json", 1, deadline_s) == []
    assert "not begun: digits-cnn, 3 epochs, seed 0, disturbed" in capsys.readouterr().err


def test_the_results_that_are_there_can_be_read() -> None:
    path = RESULTS / "elastic_accuracy.json"
    keys = [elastic_accuracy.key_of(run) for run in json.loads(path.read_text())["runs"]]
    assert len(set(keys)) == len(keys)
