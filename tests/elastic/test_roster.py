"""Rosters on a virtual network: no two memberships in one generation, no hang, a minority stops."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.elastic.network import RETRY_S, SILENCE_S, Network
from thinwire.elastic.membership import Member, Membership
from thinwire.elastic.roster import Roster

SETTLED_S = 4 * SILENCE_S


def agreed(network: Network, ids: list[str]) -> Membership:
    """The one membership that these workers are in."""
    found = {network.membership(id_) for id_ in ids}
    assert len(found) == 1, found
    membership = found.pop()
    assert membership is not None
    return membership


@pytest.mark.parametrize("num_workers", range(2, 9))
@pytest.mark.parametrize("lost", ["first", "last", "half", "all but one"])
def test_any_number_of_deaths_leaves_a_world(num_workers: int, lost: str) -> None:
    network = Network(num_workers, seed=num_workers)
    network.run(2.0)
    ids = list(network.nodes)
    gone = {
        "first": ids[:1],
        "last": ids[-1:],
        "half": ids[: num_workers // 2],
        "all but one": ids[:-1],
    }[lost]
    for id_ in gone:
        network.crash(id_)
    network.run(1.0)  # far less than a silence
    left = [id_ for id_ in ids if id_ not in gone]
    assert agreed(network, left).ids == left
    network.check_agreement()


@pytest.mark.parametrize("num_workers", range(2, 9))
def test_a_silent_worker_is_left_out_and_learns_of_it(num_workers: int) -> None:
    network = Network(num_workers, seed=num_workers)
    network.run(2.0)
    network.freeze("w1", 3 * SILENCE_S)
    network.run(2 * SILENCE_S)
    left = [id_ for id_ in network.nodes if id_ != "w1"]
    assert agreed(network, left).ids == left
    network.run(2 * SILENCE_S)
    assert network.nodes["w1"].roster.left_out is not None
    network.join("w1 again", through=left[0])
    network.run(SILENCE_S)
    assert agreed(network, [*left, "w1 again"]).ids == [*left, "w1 again"]
    network.check_agreement()


@pytest.mark.parametrize("seed", range(5))
def test_one_that_was_frozen_and_cut_off_when_it_was_left_out_learns_of_it(seed: int) -> None:
    """It missed the decision, hears all others as soon as it goes on, and has nothing to say itself."""
    network = Network(4, seed)
    network.run(2.0)
    network.freeze("w2", 4 * SILENCE_S)
    network.partition([["w0", "w1", "w3"], ["w2"]])
    network.run(2 * SILENCE_S)
    assert agreed(network, ["w0", "w1", "w3"]).ids == ["w0", "w1", "w3"]
    network.heal()
    network.run(4 * SILENCE_S)
    assert network.nodes["w2"].roster.left_out is not None
    network.check_agreement()


@pytest.mark.parametrize("num_workers", range(3, 10))
def test_of_a_split_network_one_side_goes_on(num_workers: int) -> None:
    for size in range(1, num_workers):
        network = Network(num_workers, seed=size)
        network.run(2.0)
        ids = list(network.nodes)
        sides = ids[:size], ids[size:]
        network.partition(sides)
        network.run(SETTLED_S)
        network.check_agreement()
        wins, stops = sides if 2 * size >= num_workers else sides[::-1]
        assert agreed(network, wins).ids == wins
        assert agreed(network, stops).generation == 1, "a minority decides nothing"
        assert not network.nodes[stops[0]].roster.has_quorum
        network.heal()
        network.run(SETTLED_S)
        network.check_agreement()
        assert all(network.nodes[id_].roster.left_out is not None for id_ in stops)


def test_a_broken_path_between_two_costs_one_of_them() -> None:
    network = Network(5, seed=0)
    network.run(2.0)
    network.cut = {frozenset(("w1", "w3"))}
    network.run(SETTLED_S)
    assert agreed(network, ["w0", "w1", "w2", "w4"]).ids == ["w0", "w1", "w2", "w4"]


def test_a_frozen_moment_is_forgiven() -> None:
    network = Network(4, seed=0)
    network.run(2.0)
    network.freeze("w2", SILENCE_S / 2)
    network.run(SETTLED_S)
    assert agreed(network, list(network.nodes)).generation == 1


def test_whoever_joins_comes_last_and_all_agree() -> None:
    network = Network(3, seed=0)
    network.run(2.0)
    network.join("new", through="w2")
    network.run(2.0)
    assert agreed(network, [*network.nodes]).ids == ["w0", "w1", "w2", "new"]


def taken_in_unheard(network: Network) -> None:
    """Take j0 into the second generation, while nothing reaches it."""
    network.run(1.0)
    network.join("j0", through="w0")
    network.run(0.1)
    network.partition([["j0"], [id_ for id_ in network.nodes if id_ != "j0"]])
    network.run(SILENCE_S / 2)
    assert agreed(network, ["w0", "w1"]).ids == ["w0", "w1", "j0"]
    assert network.membership("j0") is None


def test_a_joiner_that_missed_being_taken_in_is_told() -> None:
    network = Network(2, seed=0)
    taken_in_unheard(network)
    network.heal()
    network.run(1.0)
    assert agreed(network, ["w0", "w1", "j0"]).generation == 2


def test_a_joiner_that_missed_being_taken_in_has_its_vote_when_another_dies() -> None:
    network = Network(2, seed=0)
    taken_in_unheard(network)
    network.nodes["j0"].stops_knocking = True
    network.crash("w0")
    network.heal()
    network.run(SETTLED_S)
    assert agreed(network, ["w1", "j0"]).ids == ["w1", "j0"]


def test_a_minority_that_goes_on_has_another_lineage_and_never_merges() -> None:
    network = Network(5, seed=0)
    network.run(2.0)
    network.partition([["w0", "w1", "w2"], ["w3", "w4"]])
    network.run(SETTLED_S)
    for id_ in ("w3", "w4"):
        network.nodes[id_].roster.fork()
    network.heal()
    network.run(SETTLED_S)
    assert agreed(network, ["w3", "w4"]).lineage != "run"
    assert agreed(network, ["w0", "w1", "w2"]).lineage == "run"
    network.check_agreement()


FAULTS = st.lists(
    st.tuples(
        st.sampled_from(["crash", "freeze", "partition", "heal", "join"]),
        st.floats(0.0, 3 * SILENCE_S),
        st.integers(0, 2**16),
    ),
    max_size=8,
)


def after_faults(num_workers: int, seed: int, faults: list[tuple[str, float, int]]) -> Network:
    """A network that has healed; at no time did a generation have two memberships."""
    network = Network(num_workers, seed)
    network.run(1.0)
    for number, (kind, wait_s, pick) in enumerate(faults):
        living = network.living()
        chosen = living[pick % len(living)]
        if kind == "crash" and len(living) > 1:
            network.crash(chosen)
        elif kind == "freeze":
            network.freeze(chosen, wait_s)
        elif kind == "partition":
            shuffled = random.Random(pick).sample(list(network.nodes), len(network.nodes))
            network.partition([shuffled[: pick % len(shuffled)], shuffled[pick % len(shuffled) :]])
        elif kind == "heal":
            network.heal()
        elif kind == "join" and network.membership(chosen) is not None:
            network.join(f"j{number}", through=chosen)
        network.run(wait_s)
        network.check_agreement()
    network.heal()
    network.run(3 * SETTLED_S)
    network.check_agreement()
    return network


@settings(deadline=None, max_examples=60)
@given(num_workers=st.integers(2, 7), seed=st.integers(0, 2**32), faults=FAULTS)
def test_random_faults_never_give_one_generation_two_memberships(
    num_workers: int, seed: int, faults: list[tuple[str, float, int]]
) -> None:
    network = after_faults(num_workers, seed, faults)
    for world in {network.membership(id_) for id_ in network.living()} - {None}:
        assert world is not None
        there = [id_ for id_ in world.ids if id_ in network.living()]
        whole = len(there) == len(world.ids)
        assert whole or not network.nodes[there[0]].roster.has_quorum, (world, there)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(num_workers=st.integers(2, 7), seed=st.integers(0, 2**32), faults=FAULTS)
def test_after_random_faults_there_is_one_world(
    num_workers: int, seed: int, faults: list[tuple[str, float, int]]
) -> None:
    network = after_faults(num_workers, seed, faults)
    worlds = {network.membership(id_) for id_ in network.living()} - {None}
    assert len([w for w in worlds if w is not None and set(w.ids) <= set(network.living())]) <= 1, worlds


def test_what_makes_no_sense_is_dropped() -> None:
    me = Member("a", "10.0.0.1", 1)
    roster = Roster(me, Membership(1, (me, Member("b", "10.0.0.1", 2)), "run"), retry_s=RETRY_S)
    generator = random.Random(0)
    values: list[object] = ["prepare", "promise", "accept", "accepted", "decided", "behind", 1, -1, 10**30]
    values += [None, [], {}, "x" * 100, True, 1.5, ["b", "h", 3], [["b", "h", 3]], ["run", 2, []], "run"]
    for _ in range(20_000):
        body = [generator.choice(values) for _ in range(generator.randrange(7))]
        head = ["run", 1] if generator.random() < 0.7 else []
        roster.receive("b", [*head, *body], 0.0)
        roster.receive("stranger", [*head, *body], 0.0)
    assert roster.membership is not None
    assert "a" in roster.membership.ids
