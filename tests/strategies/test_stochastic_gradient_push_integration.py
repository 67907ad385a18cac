"""Push-sum over real Gloo processes: nothing is lost, and every job ends with exit code 0."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.distributed_c10d import _get_default_store

import thinwire as tw
from tests.contract.training import model_and_optimizer
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


def stand_still() -> None:
    """Worker 0 makes no step before the others have made a hundred."""
    model, _ = model_and_optimizer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    store = _get_default_store()
    with tw.attach(model, optimizer, tw.StochasticGradientPush(), bucket_bytes=256, timeout_s=500) as link:
        state = link._core.groups[0].state
        if link.rank == 0:
            store.wait(["1 is done", "2 is done"])
            for channel in state.channels:
                assert sum(len(arrival.sent) for arrival in channel.arrived) <= 2
                assert len(channel.arrived) <= 1
        for _ in range(100):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        if link.rank > 0:
            assert link.stats.instruments["mass"] > 1 / 32
            assert all(len(channel.outgoing) <= 2 for channel in state.channels)
            store.set(f"{link.rank} is done", "")
        link.synchronize()
        assert link.all_reduce([link.stats.instruments["mass"]])[0] == pytest.approx(3, abs=1e-9)


@pytest.mark.processes
def test_a_worker_that_stands_still_over_gloo() -> None:
    """As with threads, a message that is not received stays with its sender."""
    run_processes(3, stand_still)
