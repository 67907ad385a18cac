"""The status that the lab and a worker share, and the step counter that uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.lab.control import STATUS_VARIABLE, HostStatus, StepCounter


class Optimizer:
    """Stands for one of torch's: only its identity counts."""


class Thread:
    """A thread that computes and sleeps as told."""

    def __init__(self) -> None:
        self.used_s = 0.0
        self.slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


def _counter(status: HostStatus, thread: Thread, stops: set[int] | None = None) -> StepCounter:
    return StepCounter(status, stops or set(), used_s=lambda: thread.used_s, sleep=thread.sleep)


@pytest.fixture
def status() -> Iterator[HostStatus]:
    file = os.memfd_create("status")
    yield HostStatus.create(file)
    os.close(file)


def test_the_lab_and_the_worker_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    file = os.memfd_create("status")
    lab = HostStatus.create(file, speed=0.5)
    monkeypatch.setenv(STATUS_VARIABLE, f"/proc/self/fd/{file}")
    worker = HostStatus.from_environment()
    assert worker is not None
    assert worker.speed == 0.5
    worker.steps = 7
    lab.speed, lab.released = 0.25, 6
    assert (lab.steps, worker.speed, worker.released) == (7, 0.25, 6)
    restarted = HostStatus.create(file, speed=1.0)
    assert (lab.speed, lab.steps, lab.released) == (1.0, 0, 0)
    restarted.steps = 1
    assert lab.steps == 1
    os.close(file)


def test_outside_a_lab_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(STATUS_VARIABLE, raising=False)
    assert HostStatus.from_environment() is None
    monkeypatch.setenv(STATUS_VARIABLE, str(tmp_path / "gone"))
    assert HostStatus.from_environment() is None


def test_steps_of_one_optimizer_are_counted(status: HostStatus) -> None:
    count = _counter(status, Thread())
    inner, outer = Optimizer(), Optimizer()
    for step in range(6):
        count(inner, (), {})
        if step % 3 == 2:
            count(outer, (), {})
    assert status.steps == 6
    del inner
    count(outer, (), {})
    assert status.steps == 7


def test_a_slow_host_stretches_what_was_computed(status: HostStatus) -> None:
    status.speed = 0.25
    thread, optimizer = Thread(), Optimizer()
    count = _counter(status, thread)
    thread.used_s = 2.0
    count(optimizer, (), {})
    assert thread.slept_s == pytest.approx(6.0)
    status.speed = 1.0
    thread.used_s = 4.0
    count(optimizer, (), {})
    assert thread.slept_s == pytest.approx(6.0)


def test_a_worker_waits_where_a_fault_is_due(status: HostStatus) -> None:
    optimizer, naps = Optimizer(), []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            status.released = 2

    count = StepCounter(status, {2}, used_s=lambda: 0.0, sleep=sleep)
    count(optimizer, (), {})
    assert naps == []
    count(optimizer, (), {})
    assert len(naps) == 3
    count(optimizer, (), {})
    assert len(naps) == 3


def test_a_worker_does_not_wait_for_ever(status: HostStatus) -> None:
    thread, optimizer = Thread(), Optimizer()
    _counter(status, thread, {1})(optimizer, (), {})
    assert 5 < thread.slept_s < 60
