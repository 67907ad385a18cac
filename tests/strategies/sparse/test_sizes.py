"""Capacity and volume, from sizes alone."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thinwire as tw
from tests.strategies.sparse.world import Shapes, World
from thinwire.compress.sparse import Values
from thinwire.simulate import sizes as played
from thinwire.strategies.base import Strategy
from thinwire.strategies.parts import density_at, divide_capacity, total_capacity
from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.strategies.sparse.plan import MessagePlan
from thinwire.traffic import Traffic

NUMEL = 10_000_000
K = 10_000
ONE: Shapes = [(NUMEL, 0)]


def step_traffic(
    strategy: Strategy,
    world_size: int,
    step: int = 10,
    shapes: Shapes = ONE,
    dtype: torch.dtype = torch.float32,
) -> list[Traffic]:
    """The traffic of one step, counted from 0, by worker."""
    world = World(strategy, world_size, shapes, dtype, device="meta")
    if step:  # what it sends also depends on the step before
        for core in world.cores:
            core.steps = step - 1
        world.step()
    before = world.traffic
    world.step()
    return [minus(after, each) for after, each in zip(world.traffic, before, strict=True)]


def minus(a: Traffic, b: Traffic) -> Traffic:
    return Traffic(a.sent_bytes - b.sent_bytes, a.received_bytes - b.received_bytes, a.messages - b.messages)


def sent_words(strategy: Strategy, world_size: int, step: int = 10) -> float:
    """By the first worker."""
    return step_traffic(strategy, world_size, step)[0].sent_bytes / 4


@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32])
def test_volume_grows_as_it_should(world_size: int) -> None:
    gathered = 2 * K * (world_size - 1)
    assert sent_words(tw.TopK(), world_size) == pytest.approx(gathered, rel=0.001)
    for strategy, words in (
        (tw.GTopK(), 3 * K),
        (tw.GTopK(payload="bf16"), 2.5 * K),
        (tw.GTopK(complete=False), 2 * K),
        (tw.GTopK(complete=False, payload="bf16"), 1.5 * K),
    ):
        doubling = words * math.log2(world_size)
        assert sent_words(strategy, world_size) == pytest.approx(doubling, rel=0.001)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 16, 32, 100, 500])
def test_oktopk_sends_less_than_six_k_words_whatever_the_world(world_size: int) -> None:
    for traffic in step_traffic(tw.OkTopK(), world_size):
        assert traffic.sent_bytes / 4 < 6 * K
        assert traffic.received_bytes / 4 < 6 * K


@pytest.mark.parametrize("world_size", [3, 6, 7, 33])
def test_gtopk_of_any_world_costs_two_rounds_more_at_most(world_size: int) -> None:
    everyones = step_traffic(tw.GTopK(), world_size)
    assert max(traffic.messages for traffic in everyones) == world_size.bit_length()
    received, sent = zip(
        *[(traffic.received_bytes, traffic.sent_bytes) for traffic in everyones], strict=True
    )
    assert sum(received) == sum(sent)


def test_a_warm_up_goes_dense_unless_that_is_twice_as_much() -> None:
    strategy = tw.GTopK(warmup_steps=8)
    for world_size in (4, 16):  # a quarter of everything, in two or four rounds
        assert step_traffic(strategy, world_size, 0) == step_traffic(tw.AllReduce(), world_size)
    for world_size, levels in (4, 2), (16, 4):
        for step, words in (
            (2, 2 * 0.0625),
            (3, 3 * 0.0625),
            (4, 0.0625 + 2 * 0.015625),
            (8, 0.003906 + 0.002),
        ):
            expected = words * levels * NUMEL
            assert sent_words(strategy, world_size, step) == pytest.approx(expected, rel=0.001)
    assert step_traffic(strategy, 16, 9) == step_traffic(tw.GTopK(), 16)


@pytest.mark.parametrize("strategy", [tw.TopK, tw.GTopK, tw.OkTopK])
def test_the_first_stage_of_a_warm_up_goes_dense_in_any_world(strategy: type[SparseStrategy]) -> None:
    for payload, dtype in itertools.product(get_args(Values), (torch.bfloat16, torch.float32, torch.float64)):
        made = strategy(warmup_steps=8, payload=payload)
        [core] = World(made, 1, ONE, dtype, device="meta").cores
        for world_size in range(2, 40):
            plan = MessagePlan(made, core.buckets, world_size)
            assert plan.formats(0, plan.even, [0]) == [None]


@pytest.mark.parametrize("strategy", [tw.TopK, tw.GTopK, tw.OkTopK])
def test_once_it_has_adapted_all_steps_are_alike(strategy: type[SparseStrategy]) -> None:
    shapes: Shapes = [(50_000, 0), (400_000, 8), (90_000, 7)]
    made = strategy(warmup_steps=8)
    first, later = (step_traffic(made, 6, made.adapts_in + more, shapes) for more in (0, 5))
    assert first == later
    assert first != step_traffic(made, 6, made.adapts_in - 1 - made.completes, shapes)


def test_the_density_falls_in_stages() -> None:
    assert [density_at(step, 0.1, 5) for step in range(6)] == [0.25, 0.25, 0.25, 0.25, 0.25, 0.1]
    assert [density_at(step, 0.5, 2) for step in range(3)] == [0.5, 0.5, 0.5]
    assert density_at(0, 0.001, 0) == 0.001


sizes = st.lists(st.tuples(st.integers(0, 3000), st.floats(0, 1e6)), min_size=1, max_size=8)


@given(sizes, st.floats(0.0001, 1.0), st.sampled_from([4, 24, 264]))
def test_capacity_is_divided_without_rest(
    buckets: list[tuple[int, float]], density: float, quantum: int
) -> None:
    numels, weights = [numel for numel, _ in buckets], [1 + weight for _, weight in buckets]
    capacity = total_capacity(numels, density, quantum)
    capacities = divide_capacity(numels, weights, capacity, quantum)
    assert sum(capacities) == capacity
    for numel, own in zip(numels, capacities, strict=True):
        assert own % quantum == 0
        assert (own > 0) == (numel > 0)
        assert own < numel + quantum


@pytest.mark.parametrize("strategy", [tw.TopK(), tw.GTopK(), tw.OkTopK()], ids=repr)
def test_a_large_vector_travels_sparsely(strategy: Strategy) -> None:
    """However many dimensions it has: small is what has few numbers."""
    vector, matrix = ([(5_000_000,), (100, 100), (100,)], [(2500, 2000), (100, 100), (100,)])
    ours, theirs, dense = (
        played.traffic(shapes, 4, each, steps=1)[0].sent_bytes
        for shapes, each in ((vector, strategy), (matrix, strategy), (vector, tw.AllReduce()))
    )
    assert ours == theirs
    assert ours < dense / 50
