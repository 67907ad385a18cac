"""No gradient is lost, all workers hold the same bits, and traffic is known from sizes alone."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.strategies.sparse.world import Shapes, World, played_traffic, random_gradients
from thinwire.strategies.sparse.base import SparseStrategy

STEPS = 200
"""With 4 workers: what leaks slowly, leaks in a world of any size."""
FEW_STEPS = int(os.environ.get("THINWIRE_FEW_STEPS", "40"))
"""With other numbers of workers; in these, the regions of OkTopK move twice."""
FEW: Shapes = [(300, 7), (0, 5), (500, 0)]
"""A bucket without a large parameter goes dense."""
MANY: Shapes = [(700, 3)]


def run(strategy: SparseStrategy, world_size: int, shapes: Shapes, steps: int = STEPS) -> World:
    """Feed gradients in and check after every step; the world then, with nothing lost."""
    world = World(strategy, world_size, shapes)
    drawn = [random_gradients(world_size, shapes, seed) for seed in range(5)]
    fed = [torch.zeros(lossy, dtype=torch.float64) for lossy, _ in shapes]
    applied = [torch.zeros(lossy, dtype=torch.float64) for lossy, _ in shapes]
    for step in range(steps):
        gradients = drawn[step % len(drawn)]
        results = world.step(gradients)
        for bucket, (lossy, _) in enumerate(shapes):
            first = results[0][bucket]
            assert all(torch.equal(each[bucket], first) for each in results)
            sums = torch.stack([each[bucket] for each in gradients]).sum(0)
            assert close(first[lossy:] * world_size, sums[lossy:])
            fed[bucket] += sums[:lossy]
            applied[bucket] += first[:lossy]
    for bucket in range(len(shapes)):
        assert close(world_size * applied[bucket] + world.residual(bucket), fed[bucket])
    return world


def close(ours: Tensor, theirs: Tensor) -> bool:
    """The same but for rounding."""
    return bool(((ours - theirs).abs() <= 1e-12 * (1 + theirs.abs().max() if len(theirs) else 1)).all())


@pytest.mark.parametrize("strategy", [tw.TopK, tw.GTopK, tw.OkTopK])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16, 33])
def test_what_is_fed_in_is_applied_or_kept(strategy: type[SparseStrategy], world_size: int) -> None:
    made, steps = strategy(density=0.02), STEPS if world_size == 4 else FEW_STEPS
    world = run(made, world_size, FEW if world_size <= 4 else MANY, steps)
    assert world.traffic == played_traffic(made, world_size, FEW if world_size <= 4 else MANY, steps)


@pytest.mark.parametrize(
    "strategy",
    [
        tw.TopK(density=0.02, payload="bf16", warmup_steps=9),
        tw.GTopK(density=0.02, payload="bf16", exact=True),
        tw.OkTopK(density=0.02, payload="bf16"),
    ],
    ids=repr,
)
def test_neither_is_what_rounding_cuts_off(strategy: SparseStrategy) -> None:
    run(strategy, 5, FEW, steps=40)


@pytest.mark.parametrize("strategy", [tw.TopK, tw.GTopK, tw.OkTopK])
@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_nor_what_a_warm_up_leaves(strategy: type[SparseStrategy], world_size: int) -> None:
    made = strategy(density=0.005, warmup_steps=20)
    world = run(made, world_size, FEW, steps=40)
    assert world.traffic == played_traffic(made, world_size, FEW, steps=40)
    first, last = (played_traffic(made, world_size, FEW, steps)[0].sent_bytes for steps in (1, 40))
    # dense first, then sparse
    assert first == played_traffic(tw.AllReduce(), world_size, FEW, 1)[0].sent_bytes
    assert last < 20 * first


def test_half_precision_gradients_are_kept_in_single() -> None:
    world = World(tw.GTopK(density=0.05), 3, [(400, 2)], torch.bfloat16)
    fed, applied = torch.zeros(400), torch.zeros(400)
    for step in range(30):
        gradients = random_gradients(3, [(400, 2)], step, torch.bfloat16)
        results = world.step(gradients)
        fed += torch.stack([each[0] for each in gradients]).float().sum(0)[:400]
        applied += results[0][0][:400].float()
    assert world.states[0].residuals[0].dtype == torch.float32
    assert ((fed - 3 * applied - world.residual(0)).abs() <= 0.01 * fed.abs().max()).all()


def test_capacity_goes_where_large_numbers_are() -> None:
    shapes: Shapes = [(1000, 0), (1000, 0)]
    world = run(tw.GTopK(density=0.02), 4, shapes, steps=40)  # numbers of bucket 1 are three times as large
    first, second = (each.layout.capacity for each in world.states[0].runtime.formats if each)
    assert first + second == 40
    assert second > 2 * first


def test_capacity_follows_large_numbers_as_they_move() -> None:
    shapes: Shapes = [(1000, 0), (1000, 0)]
    world, left = World(tw.GTopK(density=0.02), 4, shapes), []
    for step in range(64):
        turn = step // 8 % 2  # every 8 steps the other bucket has the larger numbers, tenfold
        scales = [(10.0 if bucket == turn else 1.0) / 3.0**bucket for bucket in range(2)]
        gradients = random_gradients(4, shapes, step)
        world.step([[g * scale for g, scale in zip(own, scales, strict=True)] for own in gradients])
        left.append(world.strategy.instruments(world.states[0])["left_share"])
    assert sum(left[16:]) / len(left[16:]) < 0.08


@pytest.mark.parametrize("strategy", [tw.TopK, tw.GTopK, tw.OkTopK])
def test_with_keep_rate_what_waits_is_applied_with_the_rate_it_had(strategy: type[SparseStrategy]) -> None:
    shapes: Shapes = [(600, 4)]
    world = World(strategy(density=0.02, keep_rate=True), 3, shapes)
    fed, applied = torch.zeros(600, dtype=torch.float64), torch.zeros(600, dtype=torch.float64)
    rate = 0.0
    for step in range(60):
        rate = math.exp2(-abs(step - 20) / 10)  # up, and down
        world.rate = rate
        gradients = random_gradients(3, shapes, step)
        results = world.step(gradients)
        fed += rate * torch.stack([own[0] for own in gradients]).sum(0)[:600]
        applied += rate * results[0][0][:600]
    assert close(3 * applied + rate * world.residual(0), fed)


def test_with_keep_rate_nothing_is_made_of_a_rate_of_zero() -> None:
    world = World(tw.GTopK(density=0.02, keep_rate=True), 2, [(600, 4)])
    for step, rate in enumerate([0.0, 0.1, 0.0, 0.1]):
        world.rate = rate
        world.step(random_gradients(2, [(600, 4)], step))
        assert world.residual(0).isfinite().all()
    assert world.states[0].rates == [0.1]
