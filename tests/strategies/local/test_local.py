"""The local family against the formulas of its papers, in float64."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.contract.training import BUCKET_BYTES, batch, model_and_optimizer, played_traffic, step_once
from tests.worlds import run_threads
from thinwire.errors import SettingError
from thinwire.strategies.base import Strategy
from thinwire.strategies.local.base import LocalStrategy
from thinwire.strategies.local.fragments import Pattern
from thinwire.wire.local import LocalLane

Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(momentum: float) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=1e-3)


def trained(
    strategy: Strategy, world_size: int, steps: int, make: Make | None = None, *, pauses: bool = False
) -> list[list[Tensor]]:
    """The weights of every worker after some steps, before detach averages them; with `pauses`, every
    question is answered before the next step, however slow the machine is."""

    def train(lane: LocalLane) -> list[Tensor]:
        model, _ = model_and_optimizer()
        optimizer = (make or sgd(0.9))(model)
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
            for step in range(steps):
                step_once(model, optimizer, step, lane.rank)
                if pauses:
                    link.synchronize()
            link.synchronize()
            assert optimizer.param_groups[0]["lr"] == optimizer.defaults["lr"]  # as the user has set it
            return [p.detach().clone() for p in model.parameters()]

    return run_threads(world_size, train)


def assert_close(ours: list[Tensor], theirs: list[Tensor], within: float = 1e-9) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= within * b.norm()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sasgd_with_interval_1_is_exact(momentum: float, world_size: int) -> None:
    exact = trained(tw.AllReduce(), world_size, 12, sgd(momentum))
    for ours, theirs in zip(trained(tw.SASGD(interval=1), world_size, 12, sgd(momentum)), exact, strict=True):
        assert_close(ours, theirs)


def test_sasgd_multiplies_the_sum_by_the_global_rate() -> None:
    mean = trained(tw.SASGD(interval=3), 4, 9)
    assert_close(trained(tw.SASGD(interval=3, global_rate=0.25), 4, 9)[0], mean[0])
    assert (trained(tw.SASGD(interval=3, global_rate=0.3), 4, 9)[0][0] - mean[0][0]).norm() > 1e-3


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_hierarchy_with_one_interval_is_sasgd(groups: int) -> None:
    hierarchy = tw.HierarchicalAveraging(inner_interval=3, interval=3, groups=groups)
    for ours, theirs in zip(trained(hierarchy, 4, 7), trained(tw.SASGD(interval=3), 4, 7), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1], [2]]])
def test_a_hierarchy_is_its_formula_step_by_step(groups: list[list[int]]) -> None:
    """Strips, where groups are of one size, and all at once where they are not."""
    inner, interval, steps = 2, 4, 11
    workers = sum(map(len, groups))
    models = [model_and_optimizer()[0] for _ in range(workers)]
    optimizers = [sgd(0.9)(model) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_once(model, optimizer, step, rank)
        everywhere = [[rank for group in groups for rank in group]]
        for group in everywhere if (step + 1) % interval == 0 else groups:
            mean = torch.stack([_flat(models[rank]) for rank in group]).mean(0)
            for rank in group if (step + 1) % inner == 0 else []:
                torch.nn.utils.vector_to_parameters(mean.clone(), models[rank].parameters())
    strategy = tw.HierarchicalAveraging(inner_interval=inner, interval=interval, groups="measured")
    with patch("thinwire.strategies.local.groups.by_paths", lambda table: groups):
        averaged = trained(strategy, workers, steps)
    for ours, model in zip(averaged, models, strict=True):
        assert_close(ours, [p.detach() for p in model.parameters()])


def test_post_local_is_exact_sgd_and_then_averages() -> None:
    exact_steps, interval, workers, steps = 5, 3, 3, 13
    strategy = tw.PostLocal(exact_steps=exact_steps, interval=interval)
    exact = trained(tw.AllReduce(), workers, exact_steps)
    for ours, theirs in zip(trained(strategy, workers, exact_steps), exact, strict=True):
        assert_close(ours, theirs)
    models = [model_and_optimizer()[0] for _ in range(workers)]
    optimizers = [sgd(0.9)(model) for model in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            x, y = batch(step, rank)
            optimizers[rank].zero_grad()
            (model(x) - y).square().mean().backward()
        if step < exact_steps:
            for parameters in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack([p.grad for p in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step >= exact_steps and (step + 1) % interval == 0:
            mean = torch.stack([_flat(model) for model in models]).mean(0)
            for model in models:
                torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    for ours, model in zip(trained(strategy, workers, steps), models, strict=True):
        assert_close(ours, [p.detach() for p in model.parameters()])


def test_a_hierarchy_agrees_in_its_groups_more_often_than_over_all() -> None:
    strategy = tw.HierarchicalAveraging(inner_interval=2, interval=8, groups=2)
    workers = trained(strategy, 4, 6)
    assert_close(workers[0], workers[1], 1e-12)
    assert_close(workers[2], workers[3], 1e-12)
    assert (workers[0][0] - workers[2][0]).norm() > 1e-6


def test_a_hierarchy_with_exact_groups_equals_workers_with_their_batches() -> None:
    make: Make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)  # noqa: E731
    inside = tw.HierarchicalAveraging(interval=4, groups=2, inside="gradients")
    pairs = trained(inside, 4, 3, make)
    assert_close(pairs[0], pairs[1], 1e-12)
    alone, _ = model_and_optimizer()
    optimizer = make(alone)
    for step in range(3):
        x, y = (torch.cat(parts) for parts in zip(batch(step, 0), batch(step, 1), strict=True))
        optimizer.zero_grad()
        (alone(x) - y).square().mean().backward()
        optimizer.step()
    assert_close(pairs[0], [p.detach() for p in alone.parameters()])


@pytest.mark.parametrize(
    ("strategy", "rate", "momentum"),
    [
        *(
            (
                tw.DiLoCo(interval=3, fragments=count, outer_lr=0.6, outer_momentum=0.8, pattern=pattern),
                0.6,
                0.8,
            )
            for count in (1, 2, 3)
            for pattern in get_args(Pattern)
        ),
        (tw.PartialAveraging(interval=3), 1.0, 0.0),
        (tw.PartialAveraging(interval=3, fragments=2), 1.0, 0.0),
    ],
    ids=repr,
)
def test_the_outer_step_is_its_formula_step_by_step(
    strategy: LocalStrategy, rate: float, momentum: float
) -> None:
    """Fragments of whole steps: the formula is applied to all numbers that are due, by index."""
    interval, workers, steps = 3, 3, 10
    models = [model_and_optimizer()[0] for _ in range(workers)]
    optimizers = [sgd(0.9)(model) for model in models]
    anchor = _flat(models[0])
    velocity = torch.zeros_like(anchor)
    due_of = _due_by_step(strategy, models[0], interval)
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_once(model, optimizer, step, rank)
        due = due_of[(step + 1) % interval]
        moved = torch.stack([_flat(model) for model in models]).mean(0) - anchor
        velocity[due] = momentum * velocity[due] + moved[due]
        anchor[due] += rate * (moved[due] + momentum * velocity[due])
        for model in models:
            now = _flat(model)
            now[due] = anchor[due]
            torch.nn.utils.vector_to_parameters(now, model.parameters())
    for ours, model in zip(trained(strategy, workers, steps), models, strict=True):
        assert_close(ours, [p.detach() for p in model.parameters()])


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().view(-1) for p in model.parameters()])


def _due_by_step(strategy: LocalStrategy, model: nn.Module, interval: int) -> list[Tensor]:
    """By step modulo the interval: the places, in the model's own order, of the numbers due after it."""
    model = deepcopy(model)
    with torch.no_grad():
        start = 0
        for parameter in model.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view(parameter.shape))
            start += parameter.numel()
    link = tw.attach(model, torch.optim.SGD(model.parameters()), strategy, bucket_bytes=BUCKET_BYTES)
    buckets = link._core.buckets
    fragments = strategy.cut([bucket.num_parameters for bucket in buckets])
    found = []
    for step in range(interval):
        parts = [b.read()[slice(*span)] for b in buckets for span in fragments.due(b.index, step, interval)]
        found.append(torch.cat([torch.zeros(0), *parts]).long())
    link.detach()
    return found


def test_slow_momentum_keeps_the_meaning_of_the_learning_rate() -> None:
    """A constant gradient moves parameters as fast as without the strategy, once momentum is there."""

    def distance(strategy: Strategy, steps: int) -> float:
        def train(lane: LocalLane) -> float:
            model = nn.Linear(64, 64, bias=False).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            nn.init.zeros_(model.weight)
            with tw.attach(model, optimizer, strategy, process_group=lane) as link:
                for _ in range(steps):
                    optimizer.zero_grad()
                    model.weight.sum().backward()
                    optimizer.step()
                link.synchronize()
            return float(-model.weight.detach().mean())

        return run_threads(2, train)[0]

    slow = tw.Trickle(interval=2, density=1.0, momentum=0.75)
    exact = distance(tw.AllReduce(), 120) - distance(tw.AllReduce(), 80)
    assert distance(slow, 120) - distance(slow, 80) == pytest.approx(exact, rel=0.02)


def _count_changes(optimizer: torch.optim.Optimizer, link: tw.Link, totals: list[Tensor]) -> list[Any]:
    """Add what the optimizer itself changes to `totals`, by bucket."""
    before: list[Tensor] = []

    def begins(*_: object) -> None:  # after the link's own hook, which brings answers back
        before[:] = [bucket.read() for bucket in link._core.buckets]

    def ended(*_: object) -> None:
        for total, bucket, old in zip(totals, link._core.buckets, before, strict=True):
            total += bucket.read() - old

    hooks = [optimizer.register_step_pre_hook(begins), optimizer.register_step_post_hook(ended)]
    optimizer._optimizer_step_post_hooks.move_to_end(hooks[1].id, last=False)  # type: ignore[attr-defined]  # before mixing
    return hooks


@pytest.mark.parametrize("interval", [1, 3])
def test_downpour_applies_every_change_once(interval: int) -> None:
    workers, steps = 3, 30

    def train(lane: LocalLane) -> tuple[list[Tensor], list[Tensor], int]:
        model, optimizer = model_and_optimizer()
        draw = random.Random(lane.rank)
        strategy = tw.Downpour(interval=interval)
        with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
            state = link._core.groups[0].state
            changed = [torch.zeros_like(centre) for centre in state.centres]
            hooks = _count_changes(optimizer, link, changed)
            for step in range(steps):
                step_once(model, optimizer, step, lane.rank)
                time.sleep(draw.choice([0.0, 0.0, 0.002]))
            for hook in hooks:
                hook.remove()
            link.synchronize()
            buckets = link._core.buckets
            for total, bucket, fetched in zip(changed, buckets, state.fetched, strict=True):
                total -= bucket.read() - fetched  # not pushed yet
            asked = link.all_reduce([state.asked, -state.served])
            assert sum(asked) == 0  # none lost, none twice
            return [centre.clone() for centre in state.centres], changed, int(asked[0])

    outcomes = run_threads(workers, train)
    model, optimizer = model_and_optimizer()
    link = tw.attach(model, optimizer, tw.Downpour(), bucket_bytes=BUCKET_BYTES)
    start = [bucket.read() for bucket in link._core.buckets]
    link.detach()
    for index, first in enumerate(start):
        pushed = sum(changed[index] for _, changed, _ in outcomes)
        assert torch.allclose(outcomes[0][0][index], first + pushed, atol=1e-10)
    assert outcomes[0][2] > 0


def test_easgd_is_its_recursion() -> None:
    strategy, generator = tw.EASGD(pull=0.3), torch.Generator().manual_seed(0)
    x, c = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))
    centre, now = c.clone(), x.clone()
    for _ in range(20):
        step = torch.randn(50, generator=generator, dtype=torch.float64)
        answer = strategy.answer(strategy.question(now, 0, None), centre, 4)  # type: ignore[arg-type]
        now = now + strategy.move(now, answer, 0, None, 4) + step  # type: ignore[arg-type]
        pull = 0.3 * (x - c)
        x, c = x + step - pull, c + pull
    assert torch.allclose(now, x, atol=1e-12)
    assert torch.allclose(centre, c, atol=1e-12)


def test_easgd_workers_stay_near_their_centre() -> None:
    apart = [trained(strategy, 3, 40, pauses=True) for strategy in (tw.EASGD(interval=1), tw.Silent())]
    together, alone = ((w[0][0] - w[1][0]).norm() for w in apart)
    assert together < alone


@pytest.mark.parametrize("interval", [2, 3, 6])
def test_sasgd_sends_the_dense_bytes_divided_by_its_interval(interval: int) -> None:
    dense = trained_bytes(tw.HierarchicalAveraging(interval=1, groups=1))
    assert trained_bytes(tw.SASGD(interval=interval)) * interval == dense


def trained_bytes(strategy: Strategy) -> int:
    return played_traffic(strategy, 4)[0].sent_bytes  # of six steps


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tw.SASGD(interval=0), r"SASGD.interval must be 1 or more steps, or 'auto', got 0"),
        (lambda: tw.SASGD(global_rate=-1.0), "SASGD.global_rate"),
        (lambda: tw.DiLoCo(interval=4, fragments=5), r"DiLoCo.fragments must be 1 to interval \(4\), got 5"),
        (lambda: tw.DiLoCo(interval=4, delay=5), "DiLoCo.delay"),
        (lambda: tw.Trickle(density=0.0), "Trickle.density"),
        (lambda: tw.Trickle(momentum=1.0), "Trickle.momentum"),
        (
            lambda: tw.HierarchicalAveraging(inner_interval=3, interval=4),
            r"inner_interval must be a divisor of interval \(4\)",
        ),
        (lambda: tw.EASGD(pull=1.5), "EASGD.pull"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Strategy], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        make()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_diloco_among_peers_keeps_workers_together(world_size: int) -> None:
    strategy = tw.DiLoCo(interval=2, gossip=True, outer_lr=1.0, outer_momentum=0.5)
    make: Make = lambda model: torch.optim.SGD(model.parameters(), lr=0.02)  # noqa: E731
    together, alone = (trained(each, world_size, 40, make) for each in (strategy, tw.Silent()))
    apart = [torch.stack([w[0] for w in workers]).std(0).norm() for workers in (together, alone)]
    assert apart[0] < 0.5 * apart[1]


def test_diloco_among_two_peers_is_diloco() -> None:
    """Both anchors stay the same, so the pull between them is nothing."""
    ours, theirs = (trained(tw.DiLoCo(interval=2, gossip=gossip), 2, 9) for gossip in (True, False))
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b)


def test_trickle_says_when_steps_are_too_few() -> None:
    assert tw.Trickle().advice(5880, 8) == tw.Trickle().advice(None, 8) == ""
    said = tw.Trickle().advice(1710, 4)
    assert "in 1,710 steps: fewer than about 4,000 cost more accuracy" in said
    assert "use GossipGraD() or SASGD(interval=2)" in said
    sparse = tw.Trickle(density=0.03)
    assert sparse.advice(5880, 8) == ""
    assert "changes a parameter 6.4 times in 1,710 steps" in sparse.advice(1710, 4)
    assert "set density=0.07 or more" in sparse.advice(1710, 4)
    assert "set density=1, or train longer" in sparse.advice(100, 4)


def test_what_chooses_by_itself_says_what_it_may_cost_before_training_starts() -> None:
    """An interval that is too long for a training, and a budget."""
    said = tw.SASGD(interval="auto").advice(310, 8)
    assert "may average only every 32 steps, in 310 steps perhaps 9 times" in said
    assert "every 8 steps cost 0.8 points of accuracy with 8 workers (cifar-resnet20, 5,880 steps)" in said
    assert "may average only every 100 steps; averages every 8" in tw.SASGD(interval=100).advice(None, 8)
    assert tw.SASGD(interval=8).advice(310, 8) == tw.SASGD(interval="auto").advice(310, 1) == ""
    said = tw.DiLoCo().advice(1710, 4)
    assert "3.1 points of accuracy with 8 workers (cifar-resnet20, 5,880 steps)" in said
    assert "67.8 % of perplexity with 4 workers (text-transformer, 1,710 steps)" in said
    assert tw.DiLoCo().advice(88_000, 4) == tw.DiLoCo().advice(None, 4) == tw.DiLoCo().advice(100, 1) == ""
    said = tw.Trickle(budget="auto").advice(460, 4)
    assert "may choose Trickle(interval=8, density=1), which cost 0.5 points of accuracy" in said
    assert "460 steps: fewer than about 4,000" in said
    assert "fewer than" not in tw.Trickle(budget="auto").advice(5880, 4)
