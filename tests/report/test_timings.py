"""Medians, efficiencies, and which cell and system are spoken of first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.made import NETS, make_bench
from thinwire.event_log import read_events
from thinwire.events import StepTimed
from thinwire.timings import GridCell, Spread, best_of_ours, cells, headline, ran, speedups, timings

BIG, SMALL = "resnet-made-up", next(iter(NETS))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> list[StepTimed]:
    folder = make_bench(tmp_path_factory.mktemp("bench") / "b", trainings=False)
    return [event.record for event in read_events(folder) if isinstance(event.record, StepTimed)]


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=20))
def test_quartiles_enclose_the_median_and_lie_within_what_was_measured(values: list[float]) -> None:
    spread = Spread.of(values)
    slack = 1e-9 * max(values)
    assert min(values) - slack <= spread.low <= spread.median + slack
    assert spread.median - slack <= spread.high <= max(values) + slack
    assert spread.count == len(values)


def test_efficiency_is_taken_within_a_turn(blocks: list[StepTimed]) -> None:
    """A machine that is twice as slow during one turn changes step times, not efficiencies."""
    slow = [replace(b, step_s=2 * b.step_s) if b.turn == 3 and b.step_s else b for b in blocks]
    before = {(t.system, t.cell): t for t in timings(blocks)}
    for timing in ran(timings(slow)):
        same = before[timing.system, timing.cell]
        assert timing.efficiency is not None
        assert same.efficiency is not None
        assert timing.efficiency.median == pytest.approx(same.efficiency.median)
        assert timing.step_s is not None
        assert same.step_s is not None
        assert timing.step_s.high >= same.step_s.high


def test_ceiling_is_its_own_measure_and_comes_first(blocks: list[StepTimed]) -> None:
    found = timings(reversed(blocks))
    assert [t.family for t in found] == sorted(
        (t.family for t in found), key=["ceiling", "ours", "rival"].index
    )
    ceilings = [t for t in found if t.family == "ceiling"]
    assert all(t.efficiency == Spread(1.0, 1.0, 1.0, 5) for t in ceilings)
    without = timings(b for b in blocks if b.family != "ceiling")
    assert all(t.efficiency is None for t in without)


def test_what_could_not_run_is_kept_with_its_reason(blocks: list[StepTimed]) -> None:
    found = timings(blocks)
    absent = [t for t in found if t.step_s is None]
    assert len(absent) == len(cells(found)) == 24
    assert all("not installed" in (t.unavailable or "") for t in absent)
    assert not [t for t in ran(found) if t.unavailable]


def test_headline_is_the_middle_rate_and_the_most_workers_the_machine_carried(
    blocks: list[StepTimed],
) -> None:
    found = timings(blocks)
    assert headline(found) == GridCell(16, 200e6, SMALL)
    full = timings(replace(b, processor_full=b.workers == 16) for b in blocks)
    assert headline(full) == GridCell(8, 200e6, SMALL)
    assert headline(timings(replace(b, processor_full=True) for b in blocks)) == GridCell(16, 200e6, SMALL)
    fewer = timings(b for b in blocks if b.workers < 8 or b.family == "ceiling")
    assert headline(fewer) == GridCell(4, 200e6, SMALL)
    assert headline([]) is None


def test_best_of_ours_and_its_speed(blocks: list[StepTimed]) -> None:
    found = timings(blocks)
    assert best_of_ours(found) == "all-reduce:overlap=forward"
    assert best_of_ours([t for t in found if t.family != "ours"]) is None
    ratios = speedups(found, "all-reduce:overlap=forward", "ddp")
    assert len(ratios) == 24
    own = next(
        t for t in found if (t.system, t.cell) == ("all-reduce:overlap=forward", GridCell(8, 50e6, BIG))
    )
    other = next(t for t in found if (t.system, t.cell) == ("ddp", GridCell(8, 50e6, BIG)))
    assert ratios[own.cell] == pytest.approx(other.median_s / own.median_s)
    assert speedups(found, "all-reduce", "nobody") == {}
