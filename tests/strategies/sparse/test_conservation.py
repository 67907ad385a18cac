"""No gradient is lost, and all workers hold the same bits."""

from __future__ import annotations

import pytest
import torch

import thinwire as tw
from tests.strategies.sparse.world import World, random_gradients
from thinwire.strategies.sparse.base import SparseStrategy

SHAPES = [(900, 7), (0, 5), (400, 0), (2500, 3)]
STEPS = 20


@pytest.mark.parametrize(
    "strategy",
    [
        tw.TopK(density=0.01),
        tw.GTopK(density=0.01),
        tw.OkTopK(density=0.01),
        tw.GTopK(density=0.01, values="bf16"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 16, 33])
def test_what_is_fed_in_is_applied_or_kept(strategy: SparseStrategy, world_size: int) -> None:
    world = World(strategy, world_size, SHAPES)
    fed = [torch.zeros(lossy, dtype=torch.float64) for lossy, _ in SHAPES]
    applied = [torch.zeros(lossy, dtype=torch.float64) for lossy, _ in SHAPES]
    for step in range(STEPS):
        gradients = random_gradients(world_size, SHAPES, seed=step % 7)
        results = world.step(gradients)
        for bucket, (lossy, _) in enumerate(SHAPES):
            first = results[0][bucket]
            assert all(torch.equal(each[bucket], first) for each in results)
            total = torch.stack([each[bucket] for each in gradients]).sum(0)
            torch.testing.assert_close(first[lossy:], total[lossy:] / world_size, rtol=1e-12, atol=1e-12)
            fed[bucket] += total[:lossy]
            applied[bucket] += first[:lossy]
    for bucket in range(len(SHAPES)):
        kept = world.residual(bucket)
        scale = float(fed[bucket].abs().max()) if len(kept) else 1.0
        torch.testing.assert_close(
            fed[bucket], world_size * applied[bucket] + kept, rtol=0, atol=1e-11 * scale
        )
