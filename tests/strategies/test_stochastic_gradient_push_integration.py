"""Push-sum over real Gloo processes: nothing is lost, and every job ends with exit code 0."""

from __future__ import annotations

import pytest

from tests.strategies.test_stochastic_gradient_push import STRATEGIES, check_training
from tests.worlds import run_processes


def check_all() -> None:
    """All settings in one world, since processes take long to start."""
    for strategy in STRATEGIES:
        check_training(strategy, None)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_lost_over_gloo(world_size: int) -> None:
    run_processes(world_size, check_all)  # which fails unless all exit with 0
