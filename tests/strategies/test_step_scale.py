"""Steps of AdamW are longer where their mean is taken, so that the learning rate keeps its meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import thinwire as tw
from tests.worlds import run_threads
from thinwire.strategies.base import Strategy
from thinwire.wire.local import LocalLane

RATE = 0.01
AVERAGES: list[tuple[Strategy, float]] = [
    (tw.GossipGraD(), 1.0),
    (tw.StochasticGradientPush(), 1.0),
    (tw.SASGD(interval=2), 1.0),
    (tw.PartialAveraging(interval=2), 1.0),
    (tw.Trickle(interval=2), 0.5),
]
"""With what an outer momentum makes of the rate of SGD."""
OTHERS: list[Strategy] = [
    tw.AllReduce(),
    tw.GTopK(density=0.1),
    tw.DiLoCo(interval=2),
    tw.SASGD(interval=2, global_rate=0.5),
    tw.AutoStrategy(),
]


def rates(strategy: Strategy, optimizers: list[Any], world_size: int = 4) -> list[list[float]]:
    """The rates that steps are made with, and those that users see after them."""

    def train(lane: LocalLane) -> list[list[float]]:
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in optimizers)
        made: list[Optimizer] = [
            kind(each.parameters(), lr=RATE) for kind, each in zip(optimizers, layers, strict=True)
        ]
        seen: list[float] = []
        with tw.attach(layers, made, strategy, process_group=lane):
            for optimizer in made:
                optimizer.register_step_pre_hook(lambda it, *_: seen.append(it.param_groups[0]["lr"]))
            for _ in range(2):
                for layer, optimizer in zip(layers, made, strict=True):
                    optimizer.zero_grad()
                    layer(torch.ones(2, 8)).sum().backward()
                for optimizer in made:
                    optimizer.step()
            shown = [optimizer.param_groups[0]["lr"] for optimizer in made]
        return [seen[-len(made) :], shown]

    return run_threads(world_size, train)[0]


@pytest.mark.parametrize(("strategy", "of_sgd"), AVERAGES, ids=repr)
def test_a_mean_of_steps_is_made_of_longer_steps(strategy: Strategy, of_sgd: float) -> None:
    assert rates(strategy, [SGD]) == [[pytest.approx(of_sgd * RATE)], [RATE]]
    assert rates(strategy, [AdamW]) == [[pytest.approx(2 * RATE)], [RATE]]


@pytest.mark.parametrize(
    "strategy",
    [tw.SASGD(interval=32), tw.PartialAveraging(interval=32), tw.GossipGraD(share=1 / 32)],
    ids=repr,
)
def test_steps_are_hardly_longer_where_workers_are_long_alone(strategy: Strategy) -> None:
    assert rates(strategy, [AdamW]) == [[pytest.approx(1.25 * RATE, rel=0.05)], [RATE]]


@pytest.mark.parametrize("strategy", OTHERS, ids=repr)
def test_others_leave_rates_alone(strategy: Strategy) -> None:
    assert rates(strategy, [AdamW]) == [[RATE], [RATE]]


def test_each_optimizer_has_a_scale_of_its_own() -> None:
    assert rates(tw.SASGD(interval=2), [AdamW, SGD], world_size=2) == [
        [pytest.approx(2**0.5 * RATE), RATE],
        [RATE, RATE],
    ]


def test_noisy_steps_of_adamw_get_as_far_as_those_of_the_mean_gradient() -> None:
    """Four workers whose gradients are mostly noise: without a scale, their mean step is half as long."""

    def distance(strategy: Strategy) -> float:
        def train(lane: LocalLane) -> Tensor:
            layer = nn.Linear(64, 64, bias=False)
            nn.init.zeros_(layer.weight)
            optimizer = AdamW(layer.parameters(), lr=RATE, weight_decay=0.0)
            draw = torch.Generator().manual_seed(lane.rank)
            with tw.attach(layer, optimizer, strategy, process_group=lane) as link:
                for _ in range(60):
                    optimizer.zero_grad()
                    (layer.weight * (0.1 + torch.randn(64, 64, generator=draw))).sum().backward()
                    optimizer.step()
                link.synchronize()
            return layer.weight.detach()

        return -float(run_threads(4, train)[0].mean())

    assert distance(tw.SASGD(interval=4)) == pytest.approx(distance(tw.AllReduce()), rel=0.15)
