"""Step times as a table."""

from __future__ import annotations

import pytest

from tests.bench.records import timed
from thinwire.bench.tables import FULL_NOTE, STEP_COLUMNS, Table, step_rows, step_tables
from thinwire.timings import Spread

SYSTEMS = ("silent", "all-reduce", "ddp", "absent")


def test_ratios_are_taken_within_a_turn() -> None:
    records = [timed("silent", 0, 0.3), timed("ddp", 0, 0.6), timed("all-reduce", 0, 0.5)]
    # a busy turn, in which everything takes twice as long
    records += [timed("silent", 1, 0.6), timed("ddp", 1, 1.2), timed("all-reduce", 1, 1.0)]
    silent, ours, ddp = step_rows(records, SYSTEMS)
    assert silent.efficiency is not None
    assert silent.efficiency.median == 1
    assert ours.efficiency is not None
    assert (ours.efficiency.low, ours.efficiency.high) == pytest.approx((0.6, 0.6))
    assert ours.speed_up is not None
    assert ours.speed_up.median == pytest.approx(1.2)
    assert ddp.step_s is not None
    assert ddp.step_s.median == pytest.approx(0.9)
    assert ours.turns == 2


def test_an_absent_system_is_a_row_with_its_reason() -> None:
    records = [
        timed("silent"),
        timed("absent", step_s=None, processor_s=None, sent_bytes=None, unavailable="not installed: x"),
    ]
    (table,) = step_tables(step_rows(records, SYSTEMS))
    assert table.rows[1][:2] == ("absent", "not installed")
    assert "absent: not installed: x" in table.notes
    assert set(table.rows[1][2:]) == {"-"}
    assert len(table.rows[1]) == len(STEP_COLUMNS)


def test_a_cell_where_the_processor_was_the_limit_is_marked() -> None:
    records = [timed("silent"), timed("ddp", processor_full=True)]
    (table,) = step_tables(step_rows(records, SYSTEMS))
    assert [row[0] for row in table.rows] == ["silent", "ddp*"]
    assert FULL_NOTE in table.notes
    once = [timed("ddp", turn, processor_full=turn == 0) for turn in range(3)]
    assert not step_rows(once, SYSTEMS)[0].processor_full


def test_one_table_per_cell_with_systems_in_their_order() -> None:
    records = [timed("ddp"), timed("silent"), timed("silent", workers=4), timed("ddp", rate_bits_per_s=None)]
    tables = step_tables(step_rows(records, SYSTEMS))
    assert [table.title.split(",")[0] for table in tables] == [
        "8 workers at 200mbit",
        "4 workers at 200mbit",
        "8 workers over loopback",
    ]
    assert [row[0] for row in tables[0].rows] == ["silent", "ddp"]


def test_numbers_read_as_people_want_them() -> None:
    records = [timed("silent", step_s=0.3, sent_bytes=500.0, messages=0.0, exposed_s=0.0)]
    records.append(timed("all-reduce", step_s=1.2, messages=28.0, exposed_s=0.9))
    (table,) = step_tables(step_rows(records, SYSTEMS))
    assert table.rows == (
        ("silent", "0.300", "-", "100 %", "-", "0", "0", "0.000", "0.050"),
        ("all-reduce", "1.200", "-", "25 %", "-", "35", "28", "0.900", "0.050"),
    )


def test_markdown_has_a_heading_the_rows_and_the_notes() -> None:
    table = Table(title="T", columns=("a", "b"), rows=(("x", "1"),), notes=("n",))
    assert table.markdown().splitlines() == ["### T", "", "| a | b |", "| --- | ---: |", "| x | 1 |", "", "n"]


def test_spread_is_the_median_with_quartiles() -> None:
    assert Spread.of([3.0, 1.0, 2.0]).median == 2
    assert (Spread.of([3.0, 1.0, 2.0]).low, Spread.of([3.0, 1.0, 2.0]).high) == (1.5, 2.5)
    assert Spread.of([7.0]).count == 1
