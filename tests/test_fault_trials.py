"""The trials of `python -m benchmarks.faults`: which strategies they know, and what they call right."""

from __future__ import annotations

from typing import Any

from benchmarks.faults_trials import KINDS, STRATEGIES, WAITLESS, Trial, draw, judge
from thinwire.strategies import registry
from thinwire.strategies.base import overrides


def test_every_strategy_has_its_trials() -> None:
    assert {registry.parse(text)[0] for text in STRATEGIES} == set(registry.names())
    assert {trial.strategy for trial in draw(300, seed=0)} == set(STRATEGIES)


def test_those_who_answer_messages_wait_for_nobody() -> None:
    answering = {text for text in STRATEGIES if overrides(registry.from_text(text), "serve")}
    assert set(WAITLESS) == answering | {"silent"}


def test_one_seed_gives_the_same_trials_and_all_kinds() -> None:
    assert draw(300, seed=5)[:40] == draw(40, seed=5)
    assert {trial.kind for trial in draw(300, seed=5)} == set(KINDS)


def events(trial: Trial, named: int | None) -> dict[int, list[dict[str, Any]]]:
    """What workers write down when one is killed and the others name somebody."""
    error = {"what": "error", "at_s": 1.0, "type": "PeerLost", "rank": named, "text": ""}
    survivor: list[dict[str, Any]] = [] if named is None else [error]
    survivor.append({"what": "end", "at_s": 2.0, "code": 1 if survivor else 0, "killed": False})
    victim = [{"what": "fault", "at_s": 0.5}, {"what": "end", "at_s": 0.5, "code": -9, "killed": False}]
    return {rank: victim if rank == trial.victim else survivor for rank in trial.ranks}


def test_a_wrong_name_and_silence_are_told() -> None:
    trial = next(t for t in draw(300, seed=0) if t.kind == "kill" and len(t.hosts) > 2 and t.style == "with")
    other = next(rank for rank in trial.ranks if rank != trial.victim)
    assert judge(trial, events(trial, trial.victim))["wrong"] == []
    assert any("names" in each for each in judge(trial, events(trial, other))["wrong"])
    assert any("nothing" in each for each in judge(trial, events(trial, None))["wrong"])
