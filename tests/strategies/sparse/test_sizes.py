"""Room, rounds and volume, from sizes alone."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from thinwire.compress.layout import Values
from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.rooms import density_at, divide_room, total_room
from thinwire.traffic import Cluster, Sizes, Traffic, total

NUMEL = 10_000_000
K = 10_000
ONE = Sizes(((NUMEL, 4),))


def sent(strategy: SparseStrategy, world_size: int, rank: int = 0, step: int = 10) -> Traffic:
    """What one worker sends of a model in one bucket."""
    return total(strategy.rounds(ONE, Cluster(world_size=world_size), step), rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32])
def test_volume_grows_as_it_should(world_size: int) -> None:
    gathered = 2 * K * (world_size - 1)
    assert sent(tw.TopK(), world_size).sent_bytes / 4 == pytest.approx(gathered, rel=0.001)
    for strategy, words in (
        (tw.GTopK(), 3 * K),
        (tw.GTopK(payload="bf16"), 2.5 * K),
        (tw.GTopK(complete=False), 2 * K),
        (tw.GTopK(complete=False, payload="bf16"), 1.5 * K),
    ):
        doubling = words * math.log2(world_size)
        assert sent(strategy, world_size).sent_bytes / 4 == pytest.approx(doubling, rel=0.001)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 16, 32, 100, 500])
def test_oktopk_sends_less_than_six_k_words_whatever_the_world(world_size: int) -> None:
    assert sent(tw.OkTopK(), world_size).sent_bytes / 4 < 6 * K
    assert sent(tw.OkTopK(), world_size).received_bytes / 4 < 6 * K


@pytest.mark.parametrize("world_size", [3, 6, 7, 33])
def test_gtopk_of_any_world_costs_two_rounds_more_at_most(world_size: int) -> None:
    levels = world_size.bit_length() - 1
    messages = [sent(tw.GTopK(), world_size, rank).messages for rank in range(world_size)]
    assert max(messages) == levels + 1
    received = [sent(tw.GTopK(), world_size, rank).received_bytes for rank in range(world_size)]
    assert sum(received) == sum(sent(tw.GTopK(), world_size, r).sent_bytes for r in range(world_size))


def test_a_warm_up_goes_dense_unless_that_is_twice_as_much() -> None:
    strategy = tw.GTopK(warmup_steps=8)
    for world_size in (4, 16):  # a quarter of everything, in two or four rounds
        dense = tw.AllReduce().rounds(ONE, Cluster(world_size=world_size))
        assert sent(strategy, world_size, step=0) == total(dense, rank=0, world_size=world_size)
    for world_size, levels in (4, 2), (16, 4):
        for step, words in (
            (2, 2 * 0.0625),
            (3, 3 * 0.0625),
            (4, 0.0625 + 2 * 0.015625),
            (8, 0.003906 + 0.002),
        ):
            expected = words * levels * NUMEL * 4
            assert sent(strategy, world_size, step=step).sent_bytes == pytest.approx(expected, rel=0.001)
    assert sent(strategy, 16, step=9) == sent(tw.GTopK(), 16)


@pytest.mark.parametrize("strategy", [tw.TopK, tw.GTopK, tw.OkTopK])
def test_the_first_stage_of_a_warm_up_goes_dense_in_any_world(strategy: type[SparseStrategy]) -> None:
    for payload, itemsize, world_size in itertools.product(get_args(Values), (2, 4, 8), range(2, 40)):
        sizes, cluster = Sizes(((NUMEL, itemsize),)), Cluster(world_size=world_size)
        rounds = strategy(warmup_steps=8, payload=payload).rounds(sizes, cluster, step=0)
        assert {round.op for round in rounds} == {"all_reduce"}


@pytest.mark.parametrize("strategy", [tw.TopK, tw.GTopK, tw.OkTopK])
def test_once_it_has_adapted_all_steps_are_alike(strategy: type[SparseStrategy]) -> None:
    sizes, cluster = Sizes(((50_000, 4), (400_000, 4), (90_000, 4)), exact=(0, 100, 7)), Cluster(world_size=6)
    made = strategy(warmup_steps=8)
    first, later = (list(made.rounds(sizes, cluster, made.adapts_in + more)) for more in (0, 5))
    assert first == later


def test_the_density_falls_in_stages() -> None:
    assert [density_at(step, 0.1, 5) for step in range(6)] == [0.25, 0.25, 0.25, 0.25, 0.25, 0.1]
    assert [density_at(step, 0.5, 2) for step in range(3)] == [0.5, 0.5, 0.5]
    assert density_at(0, 0.001, 0) == 0.001


sizes = st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 1e6)), min_size=1, max_size=8)


@given(sizes, st.floats(0.0001, 1.0), st.sampled_from([4, 24, 264]))
def test_room_is_divided_without_rest(buckets: list[tuple[int, float]], density: float, quantum: int) -> None:
    numels, weights = [numel for numel, _ in buckets], [1 + weight for _, weight in buckets]
    room = total_room(numels, density, quantum)
    rooms = divide_room(numels, weights, room, quantum)
    assert sum(rooms) == room
    for numel, own in zip(numels, rooms, strict=True):
        assert own % quantum == 0
        assert (own > 0) == (numel > 0)
        assert own < numel + quantum
