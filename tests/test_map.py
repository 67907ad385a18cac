"""The map's trainings in portions: a deadline loses nothing, and what is done is not done again."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import map_page
from benchmarks.map import STRATEGIES, MapStudy, parse, tasks
from benchmarks.map_points import frontier, points_of, read_runs, time_to
from benchmarks.map_run import RATES, MapRun, MapTask, clocked, feels_the_rate, key_of, train

TASK = MapTask(recipe="digits-cnn", strategy="trickle", workers=2, seed=0, rate=None, epochs=2, device="cpu")


def test_a_training_in_portions_gives_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.map.RESULTS", tmp_path / "results")
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


def run_of(strategy: str, values: list[float], step_s: float, **more: Any) -> MapRun:
    """A run of ten epochs with ten steps each, and the same pace at all rates."""
    steps = [10 * epoch for epoch in range(1, len(values) + 1)]
    facts: dict[str, Any] = {"recipe": "digits-cnn", "workers": 4, "seed": 0, "rate": None, "epochs": 10}
    facts |= {"batch_size": 16, "metric": "accuracy", "num_parameters": 100, "distance": 0.0}
    facts |= {"compute_s": 0.01, "wall_s": 1.0, "device": "cpu", "made_with": {}, "sent_bytes_per_step": 60.0}
    seconds = {rate: [step * step_s for step in steps] for rate in RATES}
    return MapRun(
        **(facts | {"strategy": strategy, "values": values, "value": values[-1]} | more),
        steps=steps,
        seconds=seconds,
    )


def test_a_run_that_was_stopped_counts_until_a_whole_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.map.RESULTS", tmp_path)
    stopped = run_of("trickle", [0.5], 0.1, whole=False)
    task = replace(TASK, recipe=stopped.recipe, workers=stopped.workers, epochs=stopped.epochs)
    kept = tmp_path / "map-any.json"
    for runs, done in (([stopped], False), ([replace(stopped, whole=True, seconds={}), stopped], True)):
        kept.write_text(json.dumps({"runs": [asdict(run) for run in runs]}))
        study = MapStudy(tmp_path / "work", tmp_path)
        assert len(study.runs) == 1
        assert study.is_done(task) is done


def test_points_say_what_was_lost_and_when_the_target_was_reached() -> None:
    rising = [0.1 * epoch for epoch in range(1, 11)]
    exact = run_of("all-reduce", rising, step_s=1.0)
    quick = run_of("trickle", [min(0.95, 2 * value) for value in rising], step_s=0.1)
    poor = run_of("silent", [0.5] * 10, step_s=0.05)
    points = {(point.strategy, point.rate): point for point in points_of([exact, quick, poor])}
    assert len(points) == 9
    first = points["all-reduce", "20mbit"]
    assert first.lost == 0
    assert first.to_target_s == pytest.approx((90, 100))  # what it has after 90 and 99 % of its epochs
    assert points["trickle", "1gbit"].lost == pytest.approx(5)
    # 0.9 lies between the fourth epoch's 0.8 and the fifth's 0.95; 1.0 is never reached
    most, all_of_it = points["trickle", "1gbit"].to_target_s
    assert most == pytest.approx(4 + 0.1 / 0.15)
    assert all_of_it is None
    assert points["trickle", "1gbit"].sent_share == pytest.approx(60 / 600)
    assert points["silent", "1gbit"].to_target_s == (None, None)
    here = [point for point in points.values() if point.rate == "1gbit"]
    assert [point.strategy for point in frontier(here)] == ["trickle", "all-reduce"]


def test_a_perplexity_falls() -> None:
    exact = run_of("all-reduce", [200.0, 100.0], step_s=1.0, metric="perplexity", epochs=2)
    other = run_of("trickle", [250.0, 110.0], step_s=0.1, metric="perplexity", epochs=2)
    assert time_to([10.0, 20.0], [200.0, 100.0], 150.0, sign=-1.0) == pytest.approx(15)
    [_, point] = [point for point in points_of([exact, other]) if point.rate == "1gbit"]
    assert point.lost == pytest.approx(10)


def test_seeds_are_held_against_the_same_seeds_and_one_low_one_does_not_decide() -> None:
    rising = [0.1 * epoch for epoch in range(1, 11)]
    values = [[value + 0.02 * seed for value in rising] for seed in range(3)]
    exact = [run_of("all-reduce", values[seed], step_s=1.0, seed=seed) for seed in range(3)]
    other = [run_of("trickle", values[seed], step_s=0.1, seed=seed) for seed in (0, 1)]
    points = [point for point in points_of([*exact, *other]) if point.rate == "1gbit"]
    assert [point.lost for point in points] == pytest.approx([0, 0])
    assert [point.to_target_s[0] for point in points] == pytest.approx([90, 9])


def test_page_and_figures_are_what_the_results_say() -> None:
    for path, text in map_page.generated(read_runs()).items():
        assert path.read_text(encoding="utf-8") == text, "python -m benchmarks.map_page"
