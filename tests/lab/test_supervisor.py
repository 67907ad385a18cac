"""The times at which faults are due."""

from __future__ import annotations

from thinwire.hosts.description import parse_fault
from thinwire.lab.supervisor import FaultSchedule


def _schedule(*faults: str) -> FaultSchedule:
    return FaultSchedule([parse_fault(text) for text in faults])


def test_a_fault_is_due_at_the_step_of_its_own_host() -> None:
    schedule = _schedule("kill:host=1,step=20")
    assert schedule.due(0.0, [30, 19], [True, True]) == []
    ((fault, ends),) = schedule.due(0.0, [30, 20], [True, True])
    assert (str(fault), ends) == ("kill:host=1,step=20", False)
    assert schedule.due(0.0, [30, 20], [True, True]) == []
    assert schedule.pending == []


def test_a_dead_host_goes_by_the_furthest() -> None:
    schedule = _schedule("rejoin:host=1,step=40")
    assert schedule.due(0.0, [39, 20], [True, False]) == []
    assert len(schedule.due(0.0, [40, 20], [True, False])) == 1


def test_a_site_goes_by_the_furthest() -> None:
    schedule = _schedule("cut:site=0,step=5")
    assert schedule.due(9.0, [4, 4], [True, True]) == []
    assert len(schedule.due(9.0, [4, 5], [True, True])) == 1


def test_seconds_count_from_when_it_began() -> None:
    schedule = _schedule("cut:host=0,after=1,seconds=2")
    assert schedule.due(0.5, [0], [True]) == []
    ((fault, ends),) = schedule.due(1.5, [0], [True])
    assert not ends
    assert schedule.due(3.4, [0], [True]) == []
    assert schedule.due(3.5, [0], [True]) == [(fault, True)]
    assert schedule.due(9.0, [0], [True]) == []


def test_what_is_due_together_comes_in_the_order_written() -> None:
    schedule = _schedule("slow:host=0,after=1,speed=0.5", "kill:host=1,after=0", "cut:host=1,after=1")
    assert [fault.kind for fault, _ in schedule.due(5.0, [0, 0], [True, True])] == ["slow", "kill", "cut"]


def test_equal_faults_each_happen() -> None:
    schedule = _schedule("kill:host=0,after=1", "kill:host=0,after=1")
    assert len(schedule.due(1.0, [0], [True])) == 2
