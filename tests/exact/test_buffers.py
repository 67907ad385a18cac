"""Batch-norm statistics by policy: rank 0's, their average, or each worker's own."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from torch import nn

from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import (
    Place,
    Scenario,
    average_gradients_,
    batch,
    in_threads,
    loss_of,
    seeded,
    sgd,
)
from thinwire.engine.buffers import BufferPolicy
from thinwire.strategies.base import Overlap

STEPS = 5
SKIPPED = 2
"""Its gradients are dropped, its buffers are not."""
POLICIES: tuple[BufferPolicy, ...] = ("rank0", "average", "local")


def normed() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))


def batch_norm(place: Place, policy: BufferPolicy) -> Arrays:
    model = normed()
    optimizer, seen = sgd(model), []
    with place.attach(model, optimizer, buffers=policy):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, place.part(step)).backward()
            if step == SKIPPED:
                continue
            if policy != "local":
                model.eval()  # between backward and step: the new buffers, the old parameters
                seen.append(loss_of(model, batch(0)).detach())
                model.train()
            optimizer.step()
    return arrays(model) | {"seen": np.array(seen)}


def batch_norm_by_hand(policy: BufferPolicy, world_size: int) -> list[Arrays]:
    replicas = [normed() for _ in range(world_size)]
    optimizers, seen = [sgd(model) for model in replicas], []
    for step in range(STEPS):
        parts = zip(*(t.chunk(world_size) for t in batch(step)), strict=True)
        for model, optimizer, part in zip(replicas, optimizers, parts, strict=True):
            optimizer.zero_grad()
            loss_of(model, part).backward()
        average_gradients_(replicas)
        for buffers in zip(*(model.buffers() for model in replicas), strict=True):
            mean = sum(b.double() for b in buffers) / world_size
            for buffer in buffers:
                if policy != "local":
                    buffer.copy_(mean if policy == "average" else buffers[0])
        if step == SKIPPED:
            continue
        if policy != "local":
            seen.append(loss_of(replicas[0].eval(), batch(0)).detach())
            replicas[0].train()
        for optimizer in optimizers:
            optimizer.step()
    return [arrays(model) | {"seen": np.array(seen)} for model in replicas]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_policy(overlap: Overlap, policy: BufferPolicy, world_size: int) -> None:
    expected = batch_norm_by_hand(policy, world_size)
    everyone = in_threads(world_size, functools.partial(batch_norm, policy=policy), overlap)

    for weights, by_hand in zip(everyone, expected, strict=True):
        assert difference(weights, by_hand) < 1e-12
        assert weights["1.num_batches_tracked"] == STEPS
    apart = not np.array_equal(everyone[0]["1.running_mean"], everyone[1]["1.running_mean"])
    assert apart == (policy == "local")
    assert apart or same_bits(everyone[0], everyone[1])


NORMS: dict[str, Scenario] = {
    f"batch norm, {policy}": functools.partial(batch_norm, policy=policy) for policy in POLICIES
}
