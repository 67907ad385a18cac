"""The arithmetic behind the calibration."""

from __future__ import annotations

import pytest

from thinwire.errors import SettingError
from thinwire.hosts.description import describe
from thinwire.lab.calibrate import Reading, calibrate, expected_s
from thinwire.lab.network import segment_bytes

MB10 = 10_000_000


@pytest.mark.parametrize(
    ("hosts", "rate", "exchange_s", "all_reduce_s"),
    [
        (2, "50mbit", 1.6, 1.6),
        (4, "200mbit", 0.4, 0.6),
        (8, "200mbit", 0.4, 0.7),
        (4, "1gbit*3,100mbit", 0.8, 1.2),
        (3, "1gbit*2,100mbit", 0.08, 4 / 3 * 0.8),
    ],
)
def test_hosts_on_one_site(hosts: int, rate: str, exchange_s: float, all_reduce_s: float) -> None:
    lab = describe(hosts=hosts, rate=rate)
    exchanges = {"exchange, TCP": exchange_s, "exchange, Gloo": exchange_s}
    assert expected_s(lab, MB10) == pytest.approx({**exchanges, "all-reduce, Gloo": all_reduce_s})


def test_the_uplink_counts_where_it_is_crossed() -> None:
    lab = describe(hosts=4, rate="1gbit", sites="2+2", uplink="100mbit")
    assert expected_s(lab, MB10)["exchange, TCP"] == pytest.approx(0.08)
    assert expected_s(lab, MB10)["all-reduce, Gloo"] == pytest.approx(1.2)
    crossing = describe(hosts=4, rate="1gbit", sites="1+3", uplink="100mbit")
    assert expected_s(crossing, MB10)["exchange, TCP"] == pytest.approx(0.8)


def test_close_means_within_the_tolerance() -> None:
    assert Reading(operation="", expected_s=1.0, measured_s=1.11).close
    assert not Reading(operation="", expected_s=1.0, measured_s=1.13).close
    assert not Reading(operation="", expected_s=1.0, measured_s=0.8).close


def test_settings_are_checked_first() -> None:
    with pytest.raises(SettingError, match="hosts must be 2 or more"):
        calibrate(describe(hosts=1, rate="1mbit"))
    with pytest.raises(SettingError, match="megabytes must be between"):
        calibrate(describe(hosts=2, rate="1mbit"), megabytes=0)


def test_packets_are_a_millisecond_long_within_what_the_kernel_can() -> None:
    assert segment_bytes(200e6) == 25_000
    assert segment_bytes(1e6) == 4 * 1514
    assert segment_bytes(10e9) == 65_536
