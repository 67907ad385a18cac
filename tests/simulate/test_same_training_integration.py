"""The simulator, its replicas batched, trains what spawned Gloo processes train, dropout included."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.contract.table import STRATEGIES
from tests.simulate.test_same_training import TOYS, worst
from tests.simulate.training import for_real, on_the_clock, weights
from tests.worlds import run_processes
from thinwire.strategies.base import Strategy

MOST = 4
ALL: list[Strategy] = [*STRATEGIES, *TOYS]


def every_strategy(start: dict[str, Tensor]) -> dict[int, list[list[Tensor]]]:
    """What one process ends with, by number of workers and strategy."""
    rank, ended = dist.get_rank(), dict[int, list[list[Tensor]]]()
    for world_size in range(2, MOST + 1):
        group = dist.new_group(list(range(world_size)))
        if rank < world_size:
            ended[world_size] = [
                for_real(strategy, group, rank, world_size, start, dropout=True) for strategy in ALL
            ]
    dist.barrier()
    return ended


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_fifty_steps_of_digits_cnn_with_two_three_and_four_workers() -> None:
    start = weights()
    real = run_processes(MOST, every_strategy, start, timeout_s=500)
    for world_size in range(2, MOST + 1):
        for number, strategy in enumerate(ALL):
            ours, _ = on_the_clock(strategy, world_size, start, dropout=True, batched=True)
            theirs = [worker[world_size][number] for worker in real[:world_size]]
            assert worst(ours, theirs) < 1e-9, (strategy, world_size)
