"""The search of `benchmarks.sasgd_claim` over its grid, and a net made slower by `benchmarks.local_lab`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import sasgd_claim
from benchmarks.claim_figure import draw
from benchmarks.claim_page import NAMES, section
from benchmarks.local_lab import stretched
from benchmarks.sasgd_claim import RATES, SYSTEMS, ClaimRun, Trainings, parse, tuned

FIRST = ClaimRun(system="sasgd", interval=8, rate=0.0, momentum=0.0, seed=0, epochs=1)


@pytest.mark.parametrize("best", range(len(RATES)))
def test_the_best_rate_is_found_wherever_it_is(
    best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of accuracies that fall to both sides of it; rates that were tried before are not tried again."""
    trained = list[ClaimRun]()

    def train(run: ClaimRun) -> ClaimRun:
        trained.append(run)
        value = 1.0 - 0.1 * abs(RATES.index(run.rate) - best)
        return replace(run, values=[value], seconds=[1.0])

    def call(self: Trainings, runs: Sequence[ClaimRun]) -> list[ClaimRun]:
        for run in runs:
            if run.key not in self._done:
                self._keep(train(run))
        return [self._done[run.key] for run in runs]

    monkeypatch.setattr(sasgd_claim.Trainings, "__call__", call)
    work = tmp_path / "work.jsonl"
    arguments = parse(["--data", str(tmp_path), "--work", str(work)])
    found = Trainings(arguments, work).tune([FIRST])
    assert tuned(found, "sasgd").rate == RATES[best]
    assert len(trained) == len({run.key for run in trained}) == len(found)
    assert len(found) <= 3 + abs(best - FIRST.first)
    tried = len(trained)
    again = Trainings(arguments, work).tune([FIRST])
    assert (len(trained), len(again)) == (tried, tried)


def test_a_training_that_ends_early_has_no_value() -> None:
    assert replace(FIRST, epochs=2, values=[0.9], seconds=[1.0]).value == 0.0


def test_a_stretched_net_takes_longer_and_is_as_large() -> None:
    net = "params=5e6,layers=16,forward=0.1,backward=0.2"
    assert stretched(net, 2) == "params=5e6,layers=16,forward=0.2,backward=0.4"


def test_the_page_says_who_won_and_by_how_much() -> None:
    def run(system: str, seed: int, value: float) -> dict[str, object]:
        made = replace(FIRST, system=system, rate=0.1, seed=seed, values=[value], seconds=[10.0 * value])
        return asdict(made)

    values = {"all-reduce": 0.7, "sasgd": 0.6, "downpour": 0.45, "easgd": 0.65}
    config = {"workers": 8, "interval": 8, "num_images": 1000, "epochs": 1, "batch_size": 16}
    result = {
        "config": config,
        "tuning": [run(system, 0, value) for system, value in values.items()],
        "runs": [run(system, seed, value) for system, value in values.items() for seed in (1, 2)],
    }
    text = " ".join(section(result, "made.json").split())
    assert (
        "**EAMSGD won: 5.0 points above SASGD and 20.0 points above Downpour**, and 5.0 below exact SGD"
        in text
    )
    assert "| SASGD | 0.1, 0 | 60.00 % (60.00 to 60.00) | 6.0 (2 of 2) | 6.0 | 0 |" in text
    assert "| Downpour | 0.1, 0 | 45.00 % (45.00 to 45.00) | never |" in text
    assert "at the end of the grid" not in text


def test_the_figure_shows_every_training() -> None:
    tuning = [
        replace(FIRST, system=system, momentum=momentum, rate=rate, values=[rate], seconds=[1.0])
        for system in SYSTEMS
        for momentum in (0.0, 0.9)
        for rate in (0.1, 0.2)
    ]
    runs = [replace(FIRST, system=system, seed=1, values=[0.3, 0.4], seconds=[1, 2]) for system in SYSTEMS]
    drawn = ElementTree.fromstring(draw(tuning, runs, NAMES))
    told = [title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(told) == len(tuning) + 2 * len(runs)
    assert "SASGD, momentum 0.9: 20.0 % at 0.2" in told
    assert "Downpour: 40.0 % at 2" in told
