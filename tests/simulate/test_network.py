"""The model of time, against arithmetic done by hand."""

from __future__ import annotations

import pytest

from thinwire.errors import SettingError
from thinwire.hosts.description import describe
from thinwire.simulate.network import Network
from thinwire.traffic import Op, Round

MB = 1_000_000


def network(**changes: object) -> Network:
    settings: dict[str, object] = {"hosts": 4, "rate": "80mbit", **changes}
    latencies = {k: settings.pop(k) for k in ("latency_s", "uplink_latency_s", "segments") if k in settings}
    return Network(describe(**settings), **latencies)  # type: ignore[arg-type]


def test_a_message_takes_its_bytes_and_the_latency() -> None:
    sent_s, here_s = network(latency_s=0.01).transfer(0, 1, 10 * MB, now_s=5.0)
    assert (sent_s, here_s) == (6.0, 6.01)


def test_both_directions_of_a_card_at_once() -> None:
    net = network()
    assert net.transfer(0, 1, 10 * MB, 0.0)[1] == 1.0
    assert net.transfer(1, 0, 10 * MB, 0.0)[1] == 1.0
    assert net.transfer(2, 3, 10 * MB, 0.0)[1] == 1.0


def test_what_shares_a_card_waits_its_turn() -> None:
    net = network()
    assert net.transfer(0, 1, 10 * MB, 0.0)[1] == 1.0
    assert net.transfer(0, 2, 10 * MB, 0.0)[1] == 2.0
    assert net.transfer(3, 2, 10 * MB, 0.5)[1] == 3.0  # the receiver's card is busy until 2.0


def test_the_slowest_card_on_the_way_decides() -> None:
    net = network(rate="80mbit*3,8mbit")
    sent_s, here_s = net.transfer(0, 3, MB, 0.0)
    assert (sent_s, here_s) == (0.1, 1.0)
    assert net.transfer(0, 1, MB, 0.0)[1] == pytest.approx(0.2)  # the fast card is free again long before


def test_uplinks_are_shared_by_what_leaves_a_site() -> None:
    net = network(sites="2+2", uplink="8mbit", uplink_latency_s=0.5)
    assert net.transfer(0, 1, MB, 0.0)[1] == 0.1
    assert net.transfer(0, 2, MB, 0.0)[1] == pytest.approx(1.6)  # behind 0 -> 1 on the sender's card
    assert net.transfer(1, 3, MB, 0.0)[1] == pytest.approx(2.6)


def test_in_a_ring_of_sums_the_second_segment_hides_what_it_can() -> None:
    """Six messages of 20, 80 and 200 ms each, the segments half of it, and a latency of 50 ms."""
    for seconds, waits in ((0.02, 5 * 0.04), (0.08, 5 * 0.01), (0.2, 0.0)):
        what = Round(op="all_reduce", send_bytes=round(4 * seconds * 10 * MB))
        for segments, hidden in ((1, 0.0), (2, 5 * 0.05 - waits)):
            end_s = network(latency_s=0.05, segments=segments).collective(what, range(4), 0.0)
            assert end_s == pytest.approx(6 * (seconds + 0.05) - hidden)


@pytest.mark.parametrize(
    ("op", "seconds"),
    [
        ("all_reduce", 1.5 + 6 * 0.01),
        ("reduce_scatter", 0.75 + 3 * 0.01),
        ("all_gather", 3.0 + 3 * 0.01),
        ("all_to_all", 0.75 + 3 * 0.01),
        ("broadcast", 2.0 + 2 * 0.01),
    ],
)
def test_collectives_of_ten_megabytes_over_four(op: Op, seconds: float) -> None:
    end_s = network(latency_s=0.01).collective(Round(op=op, send_bytes=10 * MB), range(4), 7.0)
    assert end_s == pytest.approx(7.0 + seconds)


def test_a_ring_is_as_slow_as_its_slowest_card_or_uplink() -> None:
    what = Round(op="all_reduce", send_bytes=10 * MB)
    assert network(rate="80mbit*3,8mbit").collective(what, range(4), 0.0) == pytest.approx(15.0)
    assert network(sites="2+2", uplink="8mbit").collective(what, range(4), 0.0) == pytest.approx(15.0)


def test_collectives_queue_behind_each_other() -> None:
    net, what = network(), Round(op="all_reduce", send_bytes=10 * MB)
    assert net.collective(what, range(4), 0.0) == pytest.approx(1.5)
    assert net.collective(what, range(4), 0.1) == pytest.approx(3.0)


def test_a_cut_path_carries_nothing() -> None:
    net = network()
    net.cut(1, None, until_s=4.0)
    assert net.transfer(0, 1, 10 * MB, 0.0)[1] == 5.0
    assert net.transfer(2, 3, 10 * MB, 0.0)[1] == 1.0


def test_a_negative_latency_is_refused() -> None:
    with pytest.raises(SettingError, match=r"latency must be seconds, 0 or more, got -1"):
        network(latency_s=-1)
