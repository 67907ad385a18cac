"""Paths between workers: every pair meets once, and what cannot be reached is named."""

from __future__ import annotations

import threading
from itertools import combinations
from typing import Any

import pytest

from thinwire.planner.findings import findings
from thinwire.planner.probe import HostFacts, HostPath, Listener, quickest, rounds


def host(rank: int, **changes: Any) -> HostFacts:
    usual: dict[str, Any] = {"rank": rank, "name": f"host{rank}", "address": "127.0.0.1", "interface": "eth0"}
    usual |= {"port": 1, "machine": str(rank), "python": "3", "torch": "2", "thinwire": "0"}
    return HostFacts(**usual | changes)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16])
def test_every_pair_meets_once(world_size: int) -> None:
    met = []
    for meetings in rounds(world_size):
        assert all(meetings[peer] == rank for rank, peer in meetings.items())
        met += [(rank, peer) for rank, peer in meetings.items() if rank < peer]
    assert sorted(met) == list(combinations(range(world_size), 2))


def test_two_measure_their_path() -> None:
    listeners = [Listener(), Listener()]
    hosts = [host(rank, port=listener.port) for rank, listener in enumerate(listeners)]
    results: dict[int, HostPath | str] = {}

    def meet(rank: int) -> None:
        results[rank] = listeners[rank].meet(hosts[rank], hosts[1 - rank])

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        listeners.pop().close()
    path = results[0]
    assert isinstance(path, HostPath)
    assert path.ranks == (0, 1)
    assert 0 < path.latency_s < 1
    assert abs(path.skew_s) < 1
    assert path.bit_per_s > 1e6


def test_a_closed_port_is_a_sentence() -> None:
    listener = Listener()
    refused = listener.meet(host(1), host(0))  # nobody listens on port 1
    listener.close()
    assert isinstance(refused, str)
    assert "host1 cannot connect to host0 at 127.0.0.1" in refused


def test_findings_name_the_slow_path_the_slow_worker_and_what_differs() -> None:
    hosts = [host(0), host(1, interface="lo"), host(2, torch="1.9"), host(3)]
    rates = {0: 1e8, 1: 1e8, 2: 1e8, 3: 1e7}
    pairs = combinations(range(4), 2)
    paths = [
        HostPath(
            ranks=(a, b), latency_s=1e-4, bit_per_s=min(rates[a], rates[b]), skew_s=5.0 if b == 2 else 0.0
        )
        for a, b in pairs
    ]
    said = "\n".join(findings(hosts, paths, rates, [1.0, 0.5, 1.0, 1.0], 1e8, 5e7))
    assert "slow path: host3 (eth0) sends and receives 10 Mbit/s, others 100 Mbit/s" in said
    assert "slow worker: host1 computes at 0.50" in said
    assert "wrong interface: host1" in said
    assert "the clock of host2 is off by 5.00 s" in said
    assert "versions of torch differ: 2 on host3, 1.9 on host2" in said
    assert "sending slows down beside computing" in said


def test_equal_hosts_have_no_findings() -> None:
    hosts, rates = [host(0), host(1)], {0: 1e8, 1: 1e8}
    path = HostPath(ranks=(0, 1), latency_s=1e-4, bit_per_s=1e8, skew_s=0.0)
    assert findings(hosts, [path], rates, [1.0, 0.95], 1e8, 1e8) == []


def test_the_quickest_of_several_calls_counts() -> None:
    assert 0 < quickest(lambda: sum(range(1000)), 0.02) < 0.02
