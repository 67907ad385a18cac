"""Schedules as pure functions: permutations, mixing, meetings."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import SettingError
from thinwire.topology import Schedule, Topology

TOPOLOGIES: tuple[Topology, ...] = ("dissemination", "hypercube")


@given(world_size=st.integers(1, 70), round=st.integers(0, 400), seed=st.none() | st.integers(0, 5))
def test_every_round_is_a_permutation_and_both_ends_agree(
    world_size: int, round: int, seed: int | None
) -> None:
    for topology in TOPOLOGIES:
        if topology == "hypercube" and world_size.bit_count() != 1:
            continue
        schedule = Schedule(topology, world_size, seed)
        peers = [schedule.peers(rank, round) for rank in range(world_size)]
        assert sorted(to for to, _ in peers) == list(range(world_size))
        for rank, (to, source) in enumerate(peers):
            assert peers[to].source == rank
            assert peers[source].to == rank
            assert (to != rank) == (world_size > 1)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32])
def test_one_cycle_gives_the_exact_mean_of_a_power_of_two(topology: Topology, world_size: int) -> None:
    schedule = Schedule(topology, world_size, seed=3)
    assert 2**schedule.cycle == world_size
    for turn in range(4):
        values = [Fraction(rank**2) for rank in range(world_size)]
        mean = sum(values) / world_size
        for round in range(turn * schedule.cycle, (turn + 1) * schedule.cycle):
            values = [(values[r] + values[schedule.peers(r, round).source]) / 2 for r in range(world_size)]
        assert values == [mean] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 12, 33])
def test_the_mean_never_moves_and_the_spread_goes_down(world_size: int) -> None:
    schedule = Schedule("dissemination", world_size, seed=0)
    values = [Fraction(rank) for rank in range(world_size)]
    mean = sum(values) / world_size
    for round in range(4 * schedule.cycle):
        values = [(values[r] + values[schedule.peers(r, round).source]) / 2 for r in range(world_size)]
        assert sum(values) / world_size == mean
    assert max(values) - min(values) < Fraction(world_size, 8)


def met(topology: Topology, world_size: int, seed: int | None, rounds: int) -> set[frozenset[int]]:
    schedule = Schedule(topology, world_size, seed)
    return {
        frozenset((rank, schedule.peers(rank, round).to))
        for round in range(rounds)
        for rank in range(world_size)
    }


@pytest.mark.parametrize(("topology", "rounds"), [("dissemination", 4 * 16), ("hypercube", 8 * 16)])
def test_everyone_meets_everyone_only_with_rotation(topology: Topology, rounds: int) -> None:
    """A hypercube has half as many different peers in a cycle, so it takes twice as long."""
    everyone = {frozenset(pair) for pair in combinations(range(16), 2)}
    assert met(topology, 16, 0, rounds) == everyone
    assert met(topology, 16, None, rounds) != everyone


@pytest.mark.parametrize("seed", range(20))
def test_everyone_meets_everyone_with_any_seed(seed: int) -> None:
    assert len(met("dissemination", 16, seed, rounds=4 * 16)) == 16 * 15 // 2


def test_seeds_differ_and_the_first_cycle_is_in_order_of_rank() -> None:
    first, second = (Schedule("dissemination", 16, seed) for seed in (0, 1))
    assert [first.peers(3, round).to for round in range(4)] == [4, 5, 7, 11]
    assert [first.peers(3, r) for r in range(4, 40)] != [second.peers(3, r) for r in range(4, 40)]


@pytest.mark.parametrize(
    ("topology", "world_size", "words"),
    [
        ("ring", 4, "topology must be one of 'dissemination', 'hypercube', got 'ring'"),
        ("hypercube", 6, "topology must be 'dissemination' with 6 workers, since a hypercube needs a power"),
        ("dissemination", 0, "world_size must be at least 1, got 0"),
    ],
)
def test_wrong_schedules_are_refused(topology: Topology, world_size: int, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Schedule(topology, world_size, None)
