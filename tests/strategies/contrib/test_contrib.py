"""Contributed strategies against the formulas of their papers, in float64, and on the virtual clock."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.contract.training import BUCKET_BYTES, model_and_optimizer, step_once
from tests.simulate.training import STEPS, on_the_clock, weights
from tests.worlds import run_threads
from thinwire.errors import SettingError
from thinwire.strategies.base import Strategy
from thinwire.strategies.contrib.grouping_sgd import GroupingSGD
from thinwire.strategies.contrib.lasgd import LASGD
from thinwire.strategies.contrib.leader_sgd import LeaderSGD
from thinwire.wire.local import LocalLane


def trained(make: Callable[[int], Strategy], world_size: int, steps: int) -> list[list[Tensor]]:
    """The weights of every worker after some steps; each makes its own strategy."""

    def train(lane: LocalLane) -> list[Tensor]:
        model, optimizer = model_and_optimizer()
        strategy = make(lane.rank)
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
            for step in range(steps):
                step_once(model, optimizer, step, lane.rank)
            link.synchronize()
            return [p.detach().clone() for p in model.parameters()]

    return run_threads(world_size, train)


def _loss(step: int, rank: int) -> float:
    """Numbers that make every worker the best one at some time."""
    return float((7 * step + 3 * rank * rank) % 11)


def test_leader_sgd_is_its_formula() -> None:
    workers, steps, near_every, far_every, pull = 4, 11, 2, 4, 0.2
    models, optimizers = zip(*(model_and_optimizer() for _ in range(workers)), strict=True)
    flat = [torch.nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
    near, far = [x.clone() for x in flat], [x.clone() for x in flat]
    sums = [0.0] * workers
    leaders = []
    for step in range(1, steps + 1):
        for rank in range(workers):
            step_once(models[rank], optimizers[rank], step - 1, rank)
            sums[rank] += _loss(step, rank)
        now = [torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone() for model in models]
        moved = [
            (near[r] - now[r]) * pull / near_every + (far[r] - now[r]) * pull / far_every
            for r in range(workers)
        ]
        groups = [range(4)] if step % far_every == 0 else [range(2), range(2, 4)]
        for group in groups if step % near_every == 0 else []:
            leader = min(group, key=lambda rank: sums[rank])
            leaders.append(leader)
            for rank in group:
                followed = far if len(group) == workers else near
                followed[rank] = now[leader].clone()
                moved[rank] += pull * (now[leader] - now[rank])
                sums[rank] = 0.0
        for model, x, change in zip(models, now, moved, strict=True):
            torch.nn.utils.vector_to_parameters(x + change, model.parameters())
    assert len(set(leaders)) > 2, "several workers led"

    def make(rank: int) -> Strategy:
        told = iter(range(1, steps + 1))
        return LeaderSGD(
            inner_interval=2, interval=4, pull=pull, groups=2, loss=lambda: _loss(next(told), rank)
        )

    for ours, model in zip(trained(make, workers, steps), models, strict=True):
        for a, b in zip(ours, model.parameters(), strict=True):
            assert (a - b).norm() <= 1e-9 * b.norm()


def test_without_a_loss_the_smallest_steps_lead() -> None:
    def train(lane: LocalLane) -> float:
        model = torch.nn.Linear(4, 1, bias=False).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = LeaderSGD(inner_interval=1, interval=2, groups=1)
        with tw.attach(model, optimizer, strategy, process_group=lane) as link:
            for _ in range(4):
                (model(torch.ones(1, 4, dtype=torch.float64)) * (3 - lane.rank)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return link.stats.instruments["leads"]

    assert run_threads(3, train) == [2, 2, 4]  # alone in its group every worker leads it


def test_grouping_sgd_with_one_group_is_exact() -> None:
    ours = trained(lambda _: GroupingSGD(interval=2, similar=1e9, measured_steps=3), 3, 12)
    exact = trained(lambda _: tw.AllReduce(), 3, 12)
    for a, b in zip(ours[1], exact[1], strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm()


def test_grouping_sgd_finds_slow_workers_and_does_not_wait_for_them(caplog: pytest.LogCaptureFixture) -> None:
    start, ended_s, slow = weights(), dict[int, float](), ("1=0.5", "3=0.5")
    strategy = GroupingSGD(interval=2, measured_steps=4)
    with caplog.at_level(logging.INFO, "thinwire"):
        models, session = on_the_clock(
            strategy, 4, start, dropout=False, batched=True, slow=slow, ended_s=ended_s
        )
    assert "groups by speed: [[0, 2], [1, 3]]" in caplog.text
    assert session.stats(0).instruments["groups"] == 2
    assert ended_s[0] < 0.75 * ended_s[1], f"the fast ones wait only while speeds are measured: {ended_s}"
    assert all(torch.equal(a, b) for a, b in zip(models[0], models[2], strict=True))
    assert not torch.equal(models[0][0], models[1][0])


def test_lasgd_keeps_the_sum_of_all_changes() -> None:
    """x += mean - handed in adds up to nothing over all workers, whoever made how many steps meanwhile."""
    world_size, steps = 3, 40
    changed = torch.zeros(world_size, dtype=torch.float64)

    def train(lane: LocalLane) -> tuple[float, float]:
        model = torch.nn.Linear(8, 8, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tw.attach(model, optimizer, LASGD(), process_group=lane) as link:
            for step in range(steps):
                optimizer.zero_grad()
                (model.weight.sum() * (lane.rank + 1 + step % 3)).backward()
                changed[lane.rank] -= 0.01 * (lane.rank + 1 + step % 3)
                optimizer.step()
            link.synchronize()
            rounds = link.stats.instruments["rounds"]
            return float(model.weight.detach().mean()), rounds

    outcomes = run_threads(world_size, train)
    assert sum(mean for mean, _ in outcomes) == pytest.approx(float(changed.sum()), rel=1e-9)
    assert all(rounds >= 1 for _, rounds in outcomes)


def test_a_fast_worker_makes_more_steps_between_two_rounds_of_lasgd() -> None:
    start, ended_s = weights(), dict[int, float]()
    _, session = on_the_clock(
        LASGD(), 4, start, dropout=False, batched=True, slow=("3=0.5",), ended_s=ended_s
    )
    assert session.stats(0).instruments["steps_per_round"] > 1.5, "the slow one sets the pace of rounds"
    assert ended_s[0] < 0.55 * ended_s[3], "nobody waits"
    assert session.stats(0).steps == session.stats(3).steps == STEPS


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: LeaderSGD(inner_interval=3, interval=4),
            r"inner_interval must be a divisor of interval \(4\)",
        ),
        (lambda: LeaderSGD(pull=1.0), "LeaderSGD.pull"),
        (lambda: LeaderSGD(loss=cast("Any", 3)), "LeaderSGD.loss must be None or a function, got 3"),
        (lambda: GroupingSGD(similar=1.0), "GroupingSGD.similar must be above 1"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Strategy], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make()
