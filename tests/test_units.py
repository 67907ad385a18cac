"""Numbers in units people read."""

from __future__ import annotations

import doctest

import pytest

from thinwire import units


def test_examples_hold() -> None:
    failed, tried = doctest.testmod(units)
    assert failed == 0
    assert tried > 5


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 B"), (999.6, "1.00 kB"), (999_600, "1.00 MB"), (2e15, "2,000 TB")]
)
def test_bytes_never_show_four_digits_before_the_last_unit(count: float, text: str) -> None:
    assert units.as_bytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.9994, "999 ms"), (0.9996, "1.00 s"), (1e-5, "0.01 ms")])
def test_seconds_change_unit_at_one(seconds: float, text: str) -> None:
    assert units.as_seconds(seconds) == text


def test_slow_and_odd_rates_are_written() -> None:
    assert [units.as_rate(rate) for rate in (9600, 5, 1.5e9)] == ["9.6 kbit/s", "5 bit/s", "1.5 Gbit/s"]
