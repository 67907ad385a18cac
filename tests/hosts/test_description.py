"""Hosts, rates, durations, counts and faults read from text, and the errors for wrong ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import SettingError
from thinwire.hosts.description import Description, Fault, describe, parse_fault
from thinwire.hosts.quantities import format_rate, parse_counts, parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "bit_per_s"),
    [
        ("100mbit", 1e8),
        ("1gbit", 1e9),
        ("2.5Gbit", 2.5e9),
        ("56kbit/s", 56e3),
        ("1e3mbit", 1e9),
        ("8000bit", 8e3),
    ],
)
def test_rates(text: str, bit_per_s: float) -> None:
    assert parse_rate(text) == bit_per_s


@pytest.mark.parametrize(
    "text", ["0mbit", "", "100", "fast", "-1mbit", "1mbps", "1.2.3mbit", "7kbit", "200gbit"]
)
def test_bad_rates_are_named(text: str) -> None:
    with pytest.raises(SettingError, match="uplink must be") as raised:
        parse_rate(text, field="uplink")
    assert repr(text) in str(raised.value)


@given(st.floats(min_value=8e3, max_value=1e11))
def test_formatted_rates_read_back(bit_per_s: float) -> None:
    assert math.isclose(parse_rate(format_rate(bit_per_s).replace("e+", "e")), bit_per_s, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.4ms", 4e-4), ("20us", 2e-5), ("1.5 S", 1.5), ("2min", 120), ("1h", 3600), ("0s", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, field="latency") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "3", "s", "-1s", "1.2.3s", "1 week", "infs"])
def test_bad_durations_are_named(text: str) -> None:
    with pytest.raises(SettingError, match="latency must be a time") as raised:
        parse_duration(text, field="latency")
    assert repr(text) in str(raised.value)
    assert "0.4ms" in raised.value.hint


@pytest.mark.parametrize("text", ["1e999s", "8785h", "1e300h"])
def test_a_time_is_at_most_a_year(text: str) -> None:
    with pytest.raises(SettingError, match="latency must be at most a year"):
        parse_duration(text, field="latency")
    assert parse_duration("8784h", field="latency") == 8784 * 3600


def test_without_a_unit_a_fault_is_in_seconds() -> None:
    assert parse_fault("cut:host=1,after=1.5,seconds=2") == parse_fault("cut:host=1,after=1500ms,seconds=2s")


def test_numbers_of_workers() -> None:
    assert parse_counts("4..100") == [4, 8, 16, 32, 64, 100]
    assert parse_counts("3,5..10,5") == [3, 5, 10]
    for text in ("", "four", "4...8", "0", "8..4", "200000", "4,"):
        with pytest.raises(SettingError, match="workers must be"):
            parse_counts(text)


def test_one_rate_is_for_all_and_many_are_per_host() -> None:
    assert [host.rate_bit_per_s for host in describe(hosts=3, rate="10mbit").hosts] == [1e7] * 3
    mixed = describe(hosts=3, rate="1gbit*2,100mbit")
    assert [host.rate_bit_per_s for host in mixed.hosts] == [1e9, 1e9, 1e8]
    assert [host.address for host in mixed.hosts] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]


def test_sites_speeds_and_faults() -> None:
    lab = describe(
        hosts=4,
        rate="1gbit",
        sites="1+3",
        uplink="50mbit",
        slow=["3=0.5"],
        faults=["kill:host=3,step=20", "rejoin:host=3,after=9", "cut:site=1,after=2,seconds=1"],
    )
    assert [host.site for host in lab.hosts] == [0, 1, 1, 1]
    assert [host.speed for host in lab.hosts] == [1, 1, 1, 0.5]
    assert lab.faults[0] == Fault(kind="kill", host=3, step=20)
    assert lab.faults[2] == Fault(kind="cut", site=1, after_s=2, seconds=1)
    assert lab.scaled(0.1).uplink_bit_per_s == 5e6
    assert lab.scaled(0.1).hosts[0].rate_bit_per_s == 1e8


BAD = [
    ({"hosts": 0}, ["hosts must be 1 to 100,000", "got 0"]),
    ({"rate": "0mbit"}, ["rate must be between 8kbit and 100gbit", "'0mbit'"]),
    ({"rate": "1gbit*3,1mbit*2"}, ["rate must be given for 4 hosts", "(5)", "hint"]),
    ({"rate": "1gbit*x"}, ["rate must be repeated a whole number of times", "1gbit*x"]),
    ({"sites": "2+3", "uplink": "1mbit"}, ["sites must be 4 hosts in sum", "2+3"]),
    ({"sites": "4+0", "uplink": "1mbit"}, ["sites must be at least one host each", "4+0"]),
    ({"sites": "a+b", "uplink": "1mbit"}, ["sites must be made of whole numbers"]),
    ({"sites": "2+2"}, ["uplink must be given with several sites", "hint: add --uplink"]),
    ({"uplink": "1mbit"}, ["uplink must be given with several sites", "hint: add --sites"]),
    ({"sites": "2+2", "uplink": "0bit"}, ["uplink must be between", "'0bit'"]),
    ({"slow": ["4=0.5"]}, ["slow must be a host from 0 to 3", "4=0.5"]),
    ({"slow": ["x=0.5"]}, ["slow must be made of whole numbers"]),
    ({"slow": ["1=0"]}, ["slow must be HOST=SPEED", "1=0"]),
    ({"slow": ["1"]}, ["slow must be HOST=SPEED", "'1'"]),
    ({"slow": ["1=0.5", "1=0.6"]}, ["slow must be given once per host"]),
    ({"faults": ["kill:host=4,step=1"]}, ["fault host must be 0 to 3", "got 4"]),
    ({"faults": ["cut:site=1,after=1"]}, ["fault site must be used with several sites"]),
    ({"faults": ["rejoin:host=1,after=1"]}, ["fault rejoin must be of a host that is killed"]),
    ({"faults": ["explode:host=1,after=1"]}, ["fault must be one of", "'kill'", "'explode'"]),
    ({"faults": ["kill:host=1"]}, ["fault must be given one step= or after=", "hint"]),
    ({"faults": ["kill:host=1,step=1,after=1"]}, ["fault must be given one step= or after="]),
    ({"faults": ["kill:step=1"]}, ["fault must be given one host= or site="]),
    ({"faults": ["kill:site=1,step=1"]}, ["fault site must be used with cut or heal", "'kill'"]),
    ({"faults": ["kill:host=1,step=1,seconds=3"]}, ["fault seconds must be used with pause, slow or cut"]),
    ({"faults": ["slow:host=1,step=1"]}, ["fault speed must be given for slow"]),
    ({"faults": ["slow:host=1,step=1,speed=2"]}, ["fault speed must be above 0 and at most 1", "2.0"]),
    ({"faults": ["cut:host=1,after=-1"]}, ["fault after must be a time", "hint"]),
    ({"faults": ["cut:host=1,after=inf"]}, ["fault after must be a time", "hint"]),
    ({"faults": ["cut:host=1,after=1,seconds=long"]}, ["fault seconds must be a time", "'long'", "hint"]),
    ({"faults": ["cut:host=one,after=1"]}, ["fault host must be a number", "'one'"]),
    ({"faults": ["cut:host=1,host=2,after=1"]}, ["fault host must be given once"]),
    ({"faults": ["cut:colour=1,after=1"]}, ["fault field must be one of", "'colour'"]),
    ({"faults": ["kill:host=1,step=-1"]}, ["fault step must be 0 or more"]),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_descriptions_are_refused_with_field_rule_and_value(
    change: dict[str, object], words: list[str]
) -> None:
    settings: dict[str, object] = {"hosts": 4, "rate": "100mbit", **change}
    with pytest.raises(SettingError) as raised:
        describe(**settings)  # type: ignore[arg-type]
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "kill:host=3,step=20",
        "pause:host=0,after=1.5,seconds=2.0",
        "slow:host=1,step=0,speed=0.25",
        "heal:site=1,after=3.0",
    ],
)
def test_faults_print_as_they_are_read(text: str) -> None:
    assert str(parse_fault(text)) == text


def test_descriptions_are_values() -> None:
    first, second = (describe(hosts=2, rate="1mbit", faults=["kill:host=1,step=3"]) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert isinstance(first, Description)
