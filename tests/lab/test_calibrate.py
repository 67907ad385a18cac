"""The arithmetic behind the calibration, and the processor watch."""

from __future__ import annotations

import pytest

from thinwire.errors import SettingError
from thinwire.hosts.description import describe
from thinwire.lab.calibrate import WINDOW_S, CpuLoad, Reading, calibrate, expected_s, read_cpu
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


class Machine:
    """Two cores whose load is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.busy = 0.0

    def spend(self, share: float, windows: int, watch: CpuLoad) -> None:
        for _ in range(windows):
            self.now_s += WINDOW_S
            self.busy += share * 2 * WINDOW_S
            watch.sample()

    def watch(self) -> CpuLoad:
        return CpuLoad(read=lambda: (self.busy, 2 * self.now_s), clock=lambda: self.now_s)


def test_full_processors_are_warned_about() -> None:
    machine = Machine()
    watch = machine.watch()
    machine.spend(0.5, 6, watch)
    assert watch.warning() is None
    machine.spend(1.0, 4, watch)
    assert watch.busy_share == 0.7
    assert "full 40% of the time" in str(watch.warning())


def test_what_was_before_training_is_forgotten() -> None:
    machine = Machine()
    watch = machine.watch()
    machine.spend(1.0, 10, watch)
    watch.restart()
    machine.spend(0.9, 10, watch)
    assert watch.warning() is None
    assert abs(watch.busy_share - 0.9) < 1e-9


def test_no_time_no_warning() -> None:
    watch = Machine().watch()
    assert watch.warning() is None
    assert watch.busy_share == 0.0


def test_the_kernel_is_read() -> None:
    busy, total = read_cpu()
    assert 0 < busy < total
