"""Clusters as files: what is written is read back, and what is not one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.errors import DataError
from thinwire.hosts.description import describe
from thinwire.planner.cluster import FORMAT, Cluster, ClusterHost, stated


def two_kinds() -> Cluster:
    fast = [ClusterHost(name=f"fast{i}", rate_bit_per_s=1e9 - 2e7 * i) for i in range(3)]
    slow = ClusterHost(name="slow", rate_bit_per_s=1e8, speed=0.5)
    return Cluster(hosts=(*fast, slow), latency_s=1e-4, hop_s=2e-4, copy_bytes_per_s=5e9, measured="today")


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    two_kinds().save(tmp_path / "cluster.json", found={"slow path": "host 3"})
    assert Cluster.load(tmp_path / "cluster.json") == two_kinds()


def test_the_fastest_hosts_are_taken_first_and_too_few_are_repeated() -> None:
    assert [host.speed for host in two_kinds().describe(3).hosts] == [1.0, 1.0, 1.0]
    assert [host.speed for host in two_kinds().describe(8).hosts].count(0.5) == 2


def test_hosts_that_are_nearly_equal_become_one_kind() -> None:
    rates = [host.rate_bit_per_s for host in two_kinds().in_kinds().hosts]
    assert rates[0] == rates[1] == rates[2] == pytest.approx(9.8e8)
    assert rates[3] == 1e8


def test_the_summary_names_what_is_slow() -> None:
    assert two_kinds().summary() == "4 hosts at 100mbit and 980mbit, slow: slow at 0.50"
    assert stated(describe(hosts=1, rate="1gbit"), latency_s=0.0).summary() == "hosts at 1gbit"


def test_sites_keep_their_uplink() -> None:
    cluster = stated(describe(hosts=4, rate="1gbit", sites="2+2", uplink="50mbit"), latency_s=1e-3)
    assert cluster.describe(4).num_sites == 2
    assert cluster.describe(1).uplink_bit_per_s is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must be a cluster file in JSON"),
        (b"[]", "must be a cluster file"),
        (json.dumps({"format": FORMAT}).encode(), "has no 'hosts'"),
        (json.dumps({"format": FORMAT, "hosts": [{"x": 1}], "latency_s": 0.1}).encode(), "a host has"),
        (json.dumps({"format": FORMAT, "hosts": 3, "latency_s": 0.1}).encode(), "hosts has a value"),
    ],
)
def test_what_is_no_cluster_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "cluster.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match=words) as raised:
        Cluster.load(file)
    assert "thinwire doctor" in raised.value.hint


def test_a_cluster_without_hosts_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"format": FORMAT, "hosts": [], "latency_s": 0.1}))
    with pytest.raises(DataError, match=r"cluster\.json: hosts must be at least 1"):
        Cluster.load(file)
