"""Paths between workers: every pair meets once, and what cannot be reached is named."""

from __future__ import annotations

import random
import threading
from itertools import combinations
from typing import Any

import pytest

from thinwire.planner.findings import findings
from thinwire.planner.probe import HostFacts, HostPath, Listener, quickest, rounds
from thinwire.planner.speeds import Speeds


def host(rank: int, **changes: Any) -> HostFacts:
    usual: dict[str, Any] = {"rank": rank, "name": f"host{rank}", "address": "127.0.0.1", "interface": "eth0"}
    usual |= {"port": 1, "machine": str(rank), "python": "3", "torch": "2", "thinwire": "0"}
    return HostFacts(**usual | changes)


def path(a: int, b: int, bit_per_s: float, *, latency_s: float = 1e-4, skew_s: float = 0.0) -> HostPath:
    rates = {"bit_per_s": bit_per_s, "best_bit_per_s": bit_per_s}
    return HostPath(ranks=(a, b), latency_s=latency_s, skew_s=skew_s, **rates)


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
    paths = [path(a, b, min(rates[a], rates[b]), skew_s=5.0 if b == 2 else 0.0) for a, b in pairs]
    said = "\n".join(findings(hosts, paths, [1.0, 0.5, 1.0, 1.0], 1e8, 5e7))
    assert (
        "slow path: host3 (eth0) sends and receives 10 Mbit/s (at best 10 Mbit/s), others 100 Mbit/s" in said
    )
    assert said.count("slow path") == 1
    assert "slow worker: host1 computes at 0.50" in said
    assert "wrong interface: host1" in said
    assert "the clock of host2 is off by 5.00 s" in said
    assert "versions of torch differ: 2 on host3, 1.9 on host2" in said
    assert "sending slows down beside computing" in said


def test_equal_hosts_have_no_findings() -> None:
    assert findings([host(0), host(1)], [path(0, 1, 1e8)], [1.0, 0.95], 1e8, 1e8) == []


def test_a_path_between_two_good_hosts_is_named() -> None:
    paths = [path(a, b, 2e7 if (a, b) == (1, 2) else 1e8) for a, b in combinations(range(5), 2)]
    said = findings([host(rank) for rank in range(5)], paths, [1.0] * 5, 1e8, 1e8)
    assert said == ["slow path: host1 and host2 reach 20 Mbit/s with each other"]


@pytest.mark.parametrize("slow", [None, 3])
def test_who_is_only_disturbed_is_not_named(slow: int | None) -> None:
    """Every third try is up to ten times slower since other programs run: what is slow is slow in all."""
    rng, named = random.Random(7), list[str]()
    for _ in range(200):
        paths = []
        for a, b in combinations(range(4), 2):
            rate = 1e7 if slow in {a, b} else 1e8
            disturbed = [rng.uniform(0.1, 0.8) if rng.random() < 1 / 3 else 1.0 for _ in range(3)]
            paths.append(HostPath.of([path(a, b, rate * times) for times in disturbed]))
        said = findings([host(rank) for rank in range(4)], paths, [1.0] * 4, 1e8, 1e8)
        named += [words for words in said if words.startswith("slow")]
    pairs = [words for words in named if "with each other" in words]
    assert len(pairs) <= 24  # of 1,200 paths, all tries of 1 in 27 are disturbed, and a third of all tries
    single = [words.split(" (")[0] for words in named if words not in pairs]
    right = single.count("slow path: host3")
    assert right >= 200 if slow else right <= 4
    assert len(single) - right <= 4  # of 800 hosts


def test_paths_that_vary_are_said_to() -> None:
    varying = HostPath.of([path(0, 1, rate) for rate in (1e8, 4e7, 5e7)])
    assert (varying.bit_per_s, varying.best_bit_per_s) == (5e7, 1e8)
    [words] = findings([host(0), host(1)], [varying], [1.0, 1.0], 1e8, 1e8)
    assert words.startswith(
        "unsteady: 1 of 1 paths vary, most between host0 and host1: 50 Mbit/s in the middle"
    )


def test_the_quickest_try_says_most_about_clocks() -> None:
    tries = [
        path(0, 1, 1e8, latency_s=s, skew_s=skew) for s, skew in ((0.02, 9.0), (0.001, 0.5), (0.01, 7.0))
    ]
    whole = HostPath.of(tries)
    assert (whole.latency_s, whole.skew_s) == (0.001, 0.5)


def test_the_best_of_several_tries_is_a_workers_speed() -> None:
    tries = [Speeds(steps_per_s=1, copy_bytes_per_s=5, select_numbers_per_s=2)]
    tries += [Speeds(steps_per_s=3, copy_bytes_per_s=4, select_numbers_per_s=1)]
    assert Speeds.best(tries) == Speeds(steps_per_s=3, copy_bytes_per_s=5, select_numbers_per_s=2)


def test_the_quickest_of_several_calls_counts() -> None:
    assert 0 < quickest(lambda: sum(range(1000)), 0.02) < 0.02
