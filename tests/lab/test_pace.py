"""What the lab and a worker share, and what the worker does with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from thinwire.lab.pace import PACE_VARIABLE, Pace
from thinwire.lab.worker import StepCounter


class Optimizer:
    """Stands for one of torch's: only its identity counts."""


class Thread:
    """A thread that computes and sleeps as told."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self.slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


def _counter(pace: Pace, thread: Thread, stops: set[int] | None = None) -> StepCounter:
    return StepCounter(pace, stops or set(), used_s=lambda: thread.used_s, sleep=thread.sleep)


def test_both_sides_see_the_same(tmp_path: Path) -> None:
    lab = Pace.create(tmp_path / "pace", speed=0.5)
    worker = Pace(tmp_path / "pace")
    assert worker.speed == 0.5
    worker.steps = 7
    lab.speed, lab.released = 0.25, 6
    assert (lab.steps, worker.speed, worker.released) == (7, 0.25, 6)
    lab.close()
    worker.close()


def test_a_file_that_exists_only_in_memory_will_do() -> None:
    file = os.memfd_create("pace")
    pace = Pace.create(Path(f"/proc/self/fd/{file}"), speed=1.0)
    pace.steps = 3
    again = Pace.create(Path(f"/proc/self/fd/{file}"), speed=0.5)
    assert (pace.speed, pace.steps) == (0.5, 0)
    pace.close()
    again.close()
    os.close(file)


def test_outside_a_lab_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PACE_VARIABLE, raising=False)
    assert Pace.of_this_worker() is None
    monkeypatch.setenv(PACE_VARIABLE, str(tmp_path / "gone"))
    assert Pace.of_this_worker() is None


def test_steps_of_one_optimizer_are_counted(tmp_path: Path) -> None:
    pace = Pace.create(tmp_path / "pace")
    count = _counter(pace, Thread())
    inner, outer = Optimizer(), Optimizer()
    for step in range(6):
        count(inner, (), {})
        if step % 3 == 2:
            count(outer, (), {})
    assert pace.steps == 6
    del inner
    count(outer, (), {})
    assert pace.steps == 7
    pace.close()


def test_a_slow_host_stretches_what_was_computed(tmp_path: Path) -> None:
    pace = Pace.create(tmp_path / "pace", speed=0.25)
    thread, optimizer = Thread(), Optimizer()
    count = _counter(pace, thread)
    thread.used_s = 2.0
    count(optimizer, (), {})
    assert thread.slept_s == pytest.approx(6.0)
    pace.speed = 1.0
    thread.used_s = 4.0
    count(optimizer, (), {})
    assert thread.slept_s == pytest.approx(6.0)
    pace.close()


def test_a_worker_waits_where_a_fault_is_due(tmp_path: Path) -> None:
    pace = Pace.create(tmp_path / "pace")
    optimizer, naps = Optimizer(), []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            pace.released = 2

    count = StepCounter(pace, {2}, used_s=lambda: 0.0, sleep=sleep)
    count(optimizer, (), {})
    assert naps == []
    count(optimizer, (), {})
    assert len(naps) == 3
    count(optimizer, (), {})
    assert len(naps) == 3
    pace.close()


def test_a_worker_does_not_wait_for_ever(tmp_path: Path) -> None:
    pace = Pace.create(tmp_path / "pace")
    thread, optimizer = Thread(), Optimizer()
    _counter(pace, thread, {1})(optimizer, (), {})
    assert 5 < thread.slept_s < 60
    pace.close()
