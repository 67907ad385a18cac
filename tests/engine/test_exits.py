from __future__ import annotations

import gc
import threading

import pytest

from thinwire.engine import exits


class Thing:
    def __init__(self, told: list[str], name: str) -> None:
        self.told, self.name = told, name

    def at_exit(self) -> None:
        self.told.append(self.name)


def test_who_is_still_there_is_told_last_one_first_and_nothing_piles_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exits, "_methods", [])
    told = list[str]()
    first, second, third = (Thing(told, name) for name in "abc")
    for each in (first, second, third):
        exits.remember(each.at_exit)
    registered = len(threading._threading_atexits)  # type: ignore[attr-defined]
    for _ in range(20):
        exits.remember(Thing(told, "gone").at_exit)
    del second, each
    gc.collect()
    assert len(exits._methods) == 2
    assert len(threading._threading_atexits) == registered  # type: ignore[attr-defined]
    exits._call_all()
    assert told == ["c", "a"]
    assert not exits._methods
