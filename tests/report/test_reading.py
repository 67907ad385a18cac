"""Runs as their events tell them: whole, resumed, broken off, damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.made import make_run
from thinwire.event_log import read_events
from thinwire.events import Event, Failed, Progress, RunStarted, Summary
from thinwire.report.runs import Run
from thinwire.report.runs import make_run as put_together
from thinwire.report.subject import read_subject


def run_of(folder: Path, events: list[Event] | None = None) -> Run:
    run = put_together(folder, read_events(folder) if events is None else events)
    assert run is not None
    return run


def test_a_finished_run_agrees_with_its_summary(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path / "run", speeds=(1, 1, 1)))
    summary = run.summary
    assert summary is not None
    assert (run.state, run.world_size, run.steps, run.num_steps) == ("finished", 3, 100, 100)
    assert run.train_s == pytest.approx(summary.train_s)
    assert run.exposed_share == pytest.approx(summary.exposed_share)
    assert run.per_step("sent_bytes") == pytest.approx(summary.sent_bytes_per_step)
    assert run.samples_per_s == pytest.approx(3 * summary.samples_per_s)
    assert run.per_step("train_s") * run.steps == pytest.approx(run.train_s)


def test_speed_and_totals_of_an_unfinished_run_come_from_its_progress(tmp_path: Path) -> None:
    whole = run_of(make_run(tmp_path / "whole"))
    half = run_of(make_run(tmp_path / "half", steps=50, end="not"))
    assert (half.state, half.steps, half.num_steps, half.summary) == ("unfinished", 50, 100, None)
    assert half.samples_per_s == pytest.approx(whole.samples_per_s)
    assert half.per_step("train_s") == pytest.approx(whole.per_step("train_s"))
    assert half.train_s == pytest.approx(whole.train_s / 2)


def test_a_slow_worker_computes_longest_and_waits_least(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path / "run", speeds=(1, 0.5, 1)))
    assert max(run.workers, key=lambda worker: worker.compute_s).rank == 1
    assert min(run.workers, key=lambda worker: worker.exposed_share).rank == 1


def test_loss_is_the_mean_over_workers(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path / "run", speeds=(1, 1)))
    alone = [p.loss for p in run.workers[0].progress]
    assert len(run.losses()) == 20
    assert run.losses()[-1][1] == pytest.approx((alone[-1] or 0) + 0.005)


def test_losses_that_are_no_numbers_leave_gaps(tmp_path: Path) -> None:
    events = read_events(make_run(tmp_path / "run", speeds=(1,)))
    blank = [
        replace(event, record=replace(event.record, loss=None))
        if isinstance(event.record, Progress) and event.record.step > 50
        else event
        for event in events
    ]
    assert len(run_of(tmp_path / "run", blank).losses()) == 10


def test_causes_stand_before_what_followed(tmp_path: Path) -> None:
    run = run_of(make_run(tmp_path / "run", speeds=(1, 1, 1), steps=30, end="badly"))
    assert run.state == "failed"
    assert [event.rank for event, _ in run.failures] == [1, 0, 2]


def test_a_resumed_run_counts_what_it_did_again_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", speeds=(1, 1), steps=60, end="badly")
    first = read_events(folder)
    again = [
        replace(event, time=event.time + 100)
        for event in read_events(make_run(tmp_path / "again", speeds=(1, 1)))
        if not isinstance(event.record, Progress) or event.record.step > 40
    ]
    run = run_of(folder, first + again)
    assert (run.state, run.starts, run.steps, len(run.failures)) == ("finished", 2, 100, 2)
    steps = [progress.step for progress in run.workers[1].progress]
    assert steps == sorted(set(steps)) == list(range(5, 101, 5))
    going_on = [event for event in again if not isinstance(event.record, Summary)]
    assert run_of(folder, first + going_on).state == "unfinished"


def test_a_worker_that_fails_before_others_are_up_has_failed(tmp_path: Path) -> None:
    started = RunStarted(config={}, versions={}, host="a", pid=1, world_size=2)
    failed = Failed(host="a", error="DataError", message="no data")
    run = run_of(tmp_path, [Event(0, 0, started), Event(1, 0, failed), Event(2, 1, started)])
    assert run.state == "failed"
    assert (run.steps, run.losses(), run.samples_per_s, run.per_step("train_s")) == (0, [], 0.0, 0.0)


def test_no_events_are_no_run_and_damage_is_counted(tmp_path: Path) -> None:
    assert put_together(tmp_path, []) is None
    folder = make_run(tmp_path / "run")
    with (folder / "events" / "worker-0.jsonl").open("a") as file:
        file.write("not json\n")
    [place] = read_subject(folder).damage
    assert place.startswith("worker-0.jsonl line ")
    (folder / "config.json").write_text("not json either")
    assert run_of(folder).facts == {}
    assert run_of(folder).recipe == "digits-cnn"
