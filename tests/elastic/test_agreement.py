"""One decision whatever the network does: messages late or never, wrong suspicions, rival proposers."""

from __future__ import annotations

import random

import pytest

from thinwire.elastic.agreement import Knowledge, MembershipVote, Message
from thinwire.elastic.membership import Member, Membership, is_quorum, largest_connected


def play(seed: int) -> set[Membership]:
    """A random run of one agreement; everything that any worker has decided."""
    generator = random.Random(seed)
    members = tuple(Member(f"w{i}", "10.0.0.1", 1 + i) for i in range(generator.randint(2, 5)))
    base = Membership(1, members, "run")
    views = {id_: Knowledge() for id_ in base.ids}
    nodes = {id_: MembershipVote(base, id_, views[id_], retry_s=1.0) for id_ in base.ids}
    flying: list[tuple[str, str, Message]] = []
    loss = generator.choice([0.0, 0.1, 0.3])
    now_s = 0.0
    for _ in range(400):
        id_ = generator.choice(base.ids)
        action = generator.random()
        if action < 0.15:
            now_s += generator.choice([0.0, 0.5, 10.0])
            nodes[id_].tick(now_s)
        elif action < 0.3:
            others = [each for each in base.ids if each != id_]
            views[id_].silent = {each for each in others if generator.random() < 0.3}
        elif flying:
            sender, to, message = flying.pop(generator.randrange(len(flying)))
            if generator.random() >= loss:
                nodes[to].receive(sender, message, now_s)
        for sender, node in nodes.items():
            flying += [(sender, to, message) for to, message in node.outbox]
            node.outbox.clear()
    return {node.decided for node in nodes.values() if node.decided is not None}


def test_rival_proposers_never_decide_differently() -> None:
    decisions = [play(seed) for seed in range(1500)]
    assert all(len(each) <= 1 for each in decisions)
    assert sum(len(each) for each in decisions) > 500, "most runs decide something"


def test_two_quorums_meet_in_a_worker() -> None:
    for size in range(1, 9):
        ids = [f"w{i}" for i in range(size)]
        for bits in range(1 << size):
            votes = [id_ for i, id_ in enumerate(ids) if bits >> i & 1]
            rest = [id_ for id_ in ids if id_ not in votes]
            assert not (is_quorum(votes, ids, []) and is_quorum(rest, ids, []))
            assert is_quorum(votes, ids, []) or is_quorum(rest, ids, [])
            assert is_quorum(rest, ids, votes) == bool(rest), "deaths leave the rest a quorum"


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ([], "abcd"),
        ([("a", "b")], "acd"),
        ([("d", "a")], "abc"),
        ([("a", "b"), ("a", "c"), ("a", "d")], "bcd"),
        ([("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")], "ab"),
    ],
)
def test_those_stay_who_reach_each_other(broken: list[tuple[str, str]], expected: str) -> None:
    unreachable: dict[str, list[str]] = {}
    for one, other in broken:
        unreachable.setdefault(one, []).append(other)
    assert largest_connected("abcd", unreachable) == list(expected)
