"""The simulator, its replicas batched, trains what spawned Gloo processes train, dropout included."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.contract.table import STRATEGIES
from tests.simulate.test_same_training import TOYS, worst
from tests.simulate.training import for_real, on_the_clock, weights
from tests.worlds import run_processes


def every_strategy(start: dict[str, Tensor]) -> list[list[Tensor]]:
    """What one process ends with, by strategy."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [
        for_real(strategy, None, rank, world_size, start, dropout=True) for strategy in [*STRATEGIES, *TOYS]
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    "world_size", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_steps_of_digits_cnn(world_size: int) -> None:
    start = weights()
    real = run_processes(world_size, every_strategy, start)
    for number, strategy in enumerate([*STRATEGIES, *TOYS]):
        ours, _ = on_the_clock(strategy, world_size, start, dropout=True, batched=True)
        assert worst(ours, [worker[number] for worker in real]) < 1e-9, repr(strategy)
