"""The map's trainings in portions: a deadline loses nothing, and what is done is not done again."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.map import STRATEGIES, MapStudy, parse, tasks
from benchmarks.map_run import RATES, MapTask, clocked, feels_the_rate, key_of, train

TASK = MapTask(recipe="digits-cnn", strategy="trickle", workers=2, seed=0, rate=None, epochs=2, device="cpu")


def test_a_training_in_portions_gives_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = train(TASK, tmp_path / "whole", time.monotonic() + 600)
    assert whole is not None
    assert train(TASK, tmp_path, deadline_s=0.0) is None, "one epoch, then the time is up"
    assert [file.suffix for file in tmp_path.glob("*.*")] == [".pt"]
    rest = train(TASK, tmp_path, time.monotonic() + 600)
    assert rest is not None
    assert rest.values == whole.values
    assert rest.sent_bytes_per_step == whole.sent_bytes_per_step
    assert rest.wall_s > 0
    assert [file.suffix for file in tmp_path.glob("*.*")] == [".json"]
    study = MapStudy(tmp_path, tmp_path / "results")
    assert list(study.runs) == [key_of(TASK)]
    study.keep("digits-cnn")
    assert list(MapStudy(tmp_path / "empty", tmp_path / "results").runs) == [key_of(TASK)]
    timed = clocked(whole)
    assert list(timed.seconds) == list(RATES)
    slow, _, fast = timed.seconds.values()
    assert slow[-1] >= fast[-1] == pytest.approx(whole.steps[-1] * whole.compute_s)
    exact = clocked(replace(whole, strategy="all-reduce")).seconds["20mbit"]
    assert exact[-1] > 2 * slow[-1]
    assert clocked(timed) == timed


def test_only_strategies_that_feel_the_rate_are_trained_for_each() -> None:
    told = {text: feels_the_rate(text) for text in ("all-reduce", "trickle", "diloco", "gtopk")}
    assert not any(told.values()), told
    told = {text: feels_the_rate(text) for text in ("sasgd:interval=auto", "easgd", "gossip-grad:share=auto")}
    assert all(told.values()), told


def test_all_strategies_can_be_built_for_a_recipe() -> None:
    arguments = parse(["--recipes", "digits-cnn", "--workers", "4", "--device", "cpu"])
    planned = list(tasks(arguments, None))
    assert {task.strategy.partition(":")[0] for task in planned} == {
        text.partition(":")[0] for text in STRATEGIES
    }
    assert len({task.name for task in planned}) == len(planned)
    third = next(task for task in planned if task.strategy.startswith("post-local"))
    assert third.strategy == "post-local:exact_steps=153"  # of 20 epochs with 23 batches of 64


def test_other_trainings_have_other_files() -> None:
    others = [
        replace(TASK, seed=7),
        replace(TASK, workers=7),
        replace(TASK, epochs=7),
        replace(TASK, rate="1gbit"),
    ]
    assert len({task.name for task in (TASK, *others)}) == 5
