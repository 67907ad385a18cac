"""Schedules of faults: the same from one seed, and such that a majority can always be heard of."""

from __future__ import annotations

import pytest

from thinwire.chaos.draw import Schedule
from thinwire.errors import SettingError
from thinwire.hosts.description import Fault, describe, parse_fault

ALL = ("kill", "rejoin", "freeze", "slow", "cut", "partition")


def test_the_same_seed_gives_the_same_faults() -> None:
    one, two = (Schedule(workers=5, count=30, kinds=ALL, seed=3, sites=2).draw() for _ in range(2))
    assert one == two != Schedule(workers=5, count=30, kinds=ALL, seed=4, sites=2).draw()
    assert len(one) == 30


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_a_majority_of_the_living_can_always_be_heard_of(workers: int, seed: int) -> None:
    kinds = ("kill", "rejoin", "freeze", "slow", "cut")
    faults = Schedule(workers=workers, count=40, kinds=kinds, seed=seed).draw()
    dead, quiet_until = set[int](), 0.0
    for fault in faults:
        at, host = fault.after_s or 0.0, fault.host
        assert host is not None
        if fault.kind == "rejoin":
            dead.remove(host)
            continue
        assert host not in dead, "nothing happens to the dead"
        if fault.kind == "kill":
            dead.add(host)
        if fault.kind in ("pause", "cut"):
            assert workers - len(dead) > 2
            assert at >= quiet_until
            quiet_until = at + (fault.seconds or 0.0)
        assert fault.kind == "slow" or at >= quiet_until or fault.kind in ("pause", "cut")
        assert workers - len(dead) >= 2


def test_times_grow_and_a_lab_takes_them() -> None:
    faults = Schedule(workers=4, count=20, kinds=ALL, seed=1, sites=2).draw()
    times = [fault.after_s or 0.0 for fault in faults]
    assert times == sorted(times)
    texts = [str(fault) for fault in faults]
    assert [parse_fault(text) for text in texts] == faults
    assert describe(hosts=4, rate="1gbit", sites="3+1", uplink="1gbit", faults=texts).faults == tuple(faults)


def test_kinds_that_cannot_be_are_refused() -> None:
    for kinds in ((), ("melt",), ("rejoin",), ("partition",)):
        with pytest.raises(SettingError):
            Schedule(workers=4, count=3, kinds=kinds)


def test_only_what_is_asked_for_is_drawn() -> None:
    faults: list[Fault] = Schedule(workers=4, count=9, kinds=("freeze",), silence_s=2.0).draw()
    assert {fault.kind for fault in faults} == {"pause"}
    assert all(0.2 <= (fault.seconds or 0.0) <= 3.0 for fault in faults)
