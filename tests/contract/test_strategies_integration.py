"""The contract again where it counts: spawned Gloo processes give the same training as threads."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.contract.table import STRATEGIES
from tests.contract.training import played_traffic, train
from tests.worlds import run_processes, run_threads
from thinwire.strategies.base import Strategy
from thinwire.traffic import Traffic


def train_all(strategies: list[Strategy]) -> list[tuple[list[Tensor], Traffic]]:
    outcomes = [train(strategy, None) for strategy in strategies]
    return [(outcome.weights, outcome.counted) for outcome in outcomes]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_train_like_threads(world_size: int) -> None:
    real = run_processes(world_size, train_all, STRATEGIES)
    for index, strategy in enumerate(STRATEGIES):
        threads = run_threads(world_size, lambda lane, s=strategy: train(s, lane))  # type: ignore[misc]
        played = played_traffic(strategy, world_size)
        for rank in range(world_size):
            weights, counted = real[rank][index]
            assert counted == played[rank] == threads[rank].counted, strategy
            for ours, theirs in zip(weights, threads[rank].weights, strict=True):
                assert (ours - theirs).norm() < 1e-12 * theirs.norm(), strategy
