"""The order of blocks, the number of steps, and the expected duration: arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.bench.config import QUICK, STANDARD, BenchConfig
from thinwire.bench.plan import (
    Outlook,
    block_s,
    cells,
    exact_step_s,
    fits,
    num_steps,
    rotated,
    turn_s,
    whole_periods,
)
from thinwire.timings import GridCell

ELEVEN = tuple(f"system{i}" for i in range(11))
NET = "params=5e6,layers=16,forward=0.1,backward=0.2"


def grid(base: BenchConfig = STANDARD) -> BenchConfig:
    return replace(base, systems=ELEVEN)


def test_every_system_has_a_block_in_every_cell() -> None:
    config = grid()
    own = cells(config, 4, shaped=True)
    assert len(own) == len(set(own)) == 2 * 3
    for turn in (0, 1, 12):
        assert sorted(rotated(config.systems, turn)) == sorted(ELEVEN)


def test_every_turn_begins_with_another_system() -> None:
    assert [rotated(ELEVEN, turn)[0] for turn in (0, 1, 11)] == ["system0", "system1", "system0"]


def test_over_loopback_rates_make_no_cells() -> None:
    assert [cell.rate_bits_per_s for cell in cells(grid(), 4, shaped=False)] == [None, None]
    assert exact_step_s(GridCell(4, None, NET)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("period", "settle_s", "steps"),
    [
        (1, 0.3, 7),  # computing only
        (1, 1.7, 2),  # at least two,
        (1, 6.6, 1),  # unless they are long
        (8, 0.5, 8),  # whole periods
        (8, 7.0, 8),
        (1, 0.0, 7),  # never shorter than computing takes
    ],
)
def test_steps_fill_the_time_in_whole_periods(period: int, settle_s: float, steps: int) -> None:
    assert num_steps(timed_s=2.0, period=period, settle_s=settle_s, compute_s=0.3) == steps


@pytest.mark.parametrize("period", [1, 3, 8, 50])
def test_a_block_covers_whole_periods(period: int) -> None:
    for timed_s in (0.1, 1.0, 30.0):
        assert num_steps(timed_s=timed_s, period=period, settle_s=0.5, compute_s=0.3) % period == 0
    assert whole_periods(7, period) >= 7


def test_the_first_turn_always_happens_and_more_of_a_cell_if_there_is_time() -> None:
    assert fits(turn=0, elapsed_s=1e9, took_s=0, allowed_s=100)
    assert fits(turn=1, elapsed_s=60, took_s=40, allowed_s=100)
    assert not fits(turn=1, elapsed_s=60, took_s=41, allowed_s=100)


def test_the_reference_block_takes_as_long_as_it_did() -> None:
    """Measured on two cores: 29 s for a turn of five systems, three of them dense."""
    assert 5 * block_s(GridCell(8, 200e6, NET), timed_s=1.5) == pytest.approx(29, rel=0.15)


def test_quick_fits_into_five_minutes_and_the_grid_into_an_hour() -> None:
    quick = grid(QUICK)
    outlook = Outlook(quick, True, 60 * sum(study.minutes for study in quick.studies))
    assert outlook.left_s() < 280
    full = grid()
    outlook = Outlook(full, True, 60 * sum(study.minutes for study in full.studies))
    assert outlook.left_s() < 58.5 * 60
    assert sum(turn_s(full, count, shaped=True) for count in full.workers) < 60 * full.minutes


def test_time_that_is_left_over_goes_to_those_who_come_later() -> None:
    config = grid()
    outlook = Outlook(config, True, 0.0)
    before = outlook.allowed_s(4)
    outlook.spent[2] = 10.0
    assert outlook.allowed_s(4) > before
    for workers in (4, 8):
        outlook.spent[workers] = 10.0
    assert outlook.allowed_s(16) == pytest.approx(60 * config.minutes - 30 - 8)
    outlook.spent[16] = 60 * config.minutes
    assert outlook.left_s() == 0
