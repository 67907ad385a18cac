"""What is measured in which order, how many steps, and how long it takes: arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from thinwire.bench.config import QUICK, STANDARD, BenchConfig
from thinwire.bench.plan import (
    Cell,
    Outlook,
    block_s,
    cells,
    exact_step_s,
    may_go_on,
    num_steps,
    turn_of,
    turn_s,
)

ELEVEN = tuple(f"system{i}" for i in range(11))
NET = "params=5e6,layers=16,forward=0.1,backward=0.2"


def grid(base: BenchConfig = STANDARD) -> BenchConfig:
    return replace(base, systems=ELEVEN)


def test_every_turn_has_every_system_in_every_cell_once() -> None:
    config = grid()
    for turn in (0, 1, 12):
        blocks = list(turn_of(config, 4, turn, shaped=True))
        assert len(blocks) == len(set(blocks)) == 2 * 3 * 11
        assert {block.turn for block in blocks} == {turn}


def test_systems_of_a_cell_follow_each_other_and_begin_elsewhere_each_turn() -> None:
    config = grid()
    first, second = (list(turn_of(config, 4, turn, shaped=True)) for turn in (0, 1))
    assert len({block.cell for block in first[:11]}) == 1
    assert [block.system for block in first[:2]] == ["system0", "system1"]
    assert [block.system for block in second[:2]] == ["system1", "system2"]


def test_over_loopback_rates_make_no_cells() -> None:
    assert [cell.rate_bits_per_s for cell in cells(grid(), 4, shaped=False)] == [None, None]
    assert exact_step_s(Cell(4, None, NET)) == pytest.approx(0.3)


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


def test_the_first_turn_always_happens_and_others_if_there_is_time() -> None:
    def go(turns: int, elapsed_s: float, most: int = 3) -> bool:
        return may_go_on(turns_done=turns, most_turns=most, elapsed_s=elapsed_s, allowed_s=100)

    assert go(0, 1e9)
    assert go(1, 49)
    assert not go(1, 51)
    assert go(2, 66)
    assert not go(3, 1)


def test_the_reference_block_takes_as_long_as_it_did() -> None:
    """Measured on two cores: 29 s for a turn of five systems, three of them dense."""
    assert 5 * block_s(Cell(8, 200e6, NET), timed_s=1.5) == pytest.approx(29, rel=0.15)


def test_quick_fits_into_five_minutes_and_the_grid_into_an_hour() -> None:
    quick = grid(QUICK)
    outlook = Outlook(quick, True, 60 * sum(study.minutes for study in quick.studies))
    assert outlook.left_s() < 280
    assert outlook.turns(4) == 3
    full = grid()
    outlook = Outlook(full, True, 60 * sum(study.minutes for study in full.studies))
    assert outlook.left_s() < 58.5 * 60
    assert sum(turn_s(full, count, shaped=True) for count in full.workers) < 60 * full.minutes


def test_time_that_is_left_over_goes_to_those_who_come_later() -> None:
    config = grid()
    outlook = Outlook(config, True, 0.0)
    before = outlook.allowed_s(4)
    outlook.spent(2, 10.0)
    assert outlook.allowed_s(4) > before
    for workers in (4, 8):
        outlook.spent(workers, 10.0)
    assert outlook.allowed_s(16) == pytest.approx(60 * config.minutes - 30 - 8)
    outlook.spent(16, 60 * config.minutes)
    assert outlook.left_s() == 0
