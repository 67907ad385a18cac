"""Odd numbers: NaN and infinity on one worker, gradients that no step uses, zeros, ties, tiny models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire as tw
from tests.contract.table import BY_THE_CLOCK, STRATEGIES
from tests.contract.training import BUCKET_BYTES, batch, model_and_optimizer, step_once
from tests.worlds import run_threads
from thinwire.errors import NumericError, PeerLost, ThinwireError
from thinwire.strategies.base import Strategy, overrides
from thinwire.wire.local import LocalLane

TALKING = [s for s in STRATEGIES + BY_THE_CLOCK if not isinstance(s, tw.Silent)]
REDUCING = [s for s in TALKING if overrides(s, "reduce")]
every_talking = pytest.mark.parametrize("strategy", TALKING, ids=repr)
every_reducing = pytest.mark.parametrize("strategy", REDUCING, ids=repr)
every_mixing = pytest.mark.parametrize("strategy", [s for s in TALKING if overrides(s, "mix")], ids=repr)


def attach(model: nn.Module, optimizer: Optimizer, strategy: Strategy, lane: LocalLane) -> tw.Link:
    return tw.attach(
        model,
        optimizer,
        strategy,
        process_group=lane,
        bucket_bytes=BUCKET_BYTES,
        buffers="local",
        timeout_s=500,
    )


def spoil(model: nn.Module, number: float) -> None:
    """What a bad sample does, in one parameter."""
    model[2].bias.register_hook(lambda gradient: gradient + number)  # type: ignore[index]


@every_talking
@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_what_is_not_finite_is_refused_by_all_and_named(strategy: Strategy, number: float) -> None:
    def train(lane: LocalLane) -> tuple[ThinwireError, list[Tensor]]:
        model, optimizer = model_and_optimizer()
        try:
            with attach(model, optimizer, strategy, lane):
                for step in range(12):
                    if step == 3 and lane.rank == 1:
                        spoil(model, number)
                    step_once(model, optimizer, step, lane.rank)
        except (NumericError, PeerLost) as error:
            return error, [p.detach() for p in model.parameters()]
        raise AssertionError("nothing was refused")

    everyone = run_threads(3, train)
    for rank, (error, weights) in enumerate(everyone):
        assert "2.bias" in error.message
        if overrides(strategy, "reduce"):
            assert "step 4: the gradient of 2.bias on worker 1 is not finite" in error.message
        elif rank == 1:
            assert isinstance(error, NumericError)
        else:
            assert "worker 1" in error.message
        if rank != 1 or overrides(strategy, "reduce"):
            assert all(bool(p.isfinite().all()) for p in weights)


@pytest.mark.parametrize("strategy", [s for s in REDUCING if not overrides(s, "mix")], ids=repr)
def test_a_grad_scaler_leaves_such_a_step_out(strategy: Strategy) -> None:
    """And whatever the strategy keeps for later steps is as if it had not been."""

    def train(lane: LocalLane, spoilt: int) -> list[Tensor]:
        model, optimizer = model_and_optimizer()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=999)
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(8):
                x, y = batch(step - (step > spoilt), lane.rank)  # the batch that was lost comes again
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                scaler.scale(loss * math.inf if step == spoilt and lane.rank == 1 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                if step == 7 - (spoilt > 7):
                    break
            assert link.stats.steps == 7
        return [p.detach() for p in model.parameters()]

    spoilt = run_threads(2, lambda lane: train(lane, spoilt=3))
    clean = run_threads(2, lambda lane: train(lane, spoilt=99))
    for ours, theirs in zip(spoilt, clean, strict=True):
        assert all(bool(p.isfinite().all()) for p in ours)
        if isinstance(strategy, tw.AllReduce):  # others choose what to send by the steps they have seen
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*spoilt, strict=True))


def train_scaled(
    lane: LocalLane, strategy: Strategy, spoilt: int | None = None, *, scales: bool = True
) -> tuple[list[Tensor], float]:
    """The weights after 8 steps, and the scale; worker 1 has a bad gradient in the step `spoilt`."""
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=999, enabled=scales)
    with attach(model, optimizer, strategy, lane) as link:
        for step in range(8):
            x, y = batch(step, lane.rank)
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            scaler.scale(loss * math.inf if step == spoilt and lane.rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert link.stats.steps == 8
    return [p.detach() for p in model.parameters()], scaler.get_scale()


@every_mixing
def test_a_grad_scaler_leaves_out_the_step_of_one_worker_alone(strategy: Strategy) -> None:
    """Which still counts, so that workers stay together; the others do not notice."""
    first, second = run_threads(2, lambda lane: train_scaled(lane, strategy, spoilt=3))
    assert all(bool(p.isfinite().all()) for p in first[0] + second[0])
    all_know = isinstance(strategy, tw.PostLocal)  # which averages gradients in that step
    assert (first[1], second[1]) == (2.0 if all_know else 4.0, 2.0)


@every_mixing
def test_a_grad_scaler_changes_no_bits(strategy: Strategy) -> None:
    if strategy in BY_THE_CLOCK:
        pytest.skip("no two runs are alike")
    scaled = run_threads(2, lambda lane: train_scaled(lane, strategy))
    plain = run_threads(2, lambda lane: train_scaled(lane, strategy, scales=False))
    for (ours, _), (theirs, _) in zip(scaled, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@every_reducing
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_dropped_never_count(strategy: Strategy, set_to_none: bool) -> None:
    if strategy.overlap == "forward" and not set_to_none:
        pytest.skip("which keeps no gradients that could be set to zero")

    def train(lane: LocalLane, *, drops: bool) -> tuple[list[Tensor], dict[str, Any]]:
        model, optimizer = model_and_optimizer()
        with attach(model, optimizer, strategy, lane) as link:
            for step in range(6):
                if drops and step in (2, 3):
                    (model(torch.full((2, 8), 1e8).double()) * 1e12).sum().backward()
                    optimizer.zero_grad(set_to_none=set_to_none)
                step_once(model, optimizer, step, lane.rank)
            leaves = link.state_dict()["leaves"]
        return [p.detach() for p in model.parameters()], leaves

    plain = run_threads(2, lambda lane: train(lane, drops=False))
    dropped = run_threads(2, lambda lane: train(lane, drops=True))
    for (weights, _), (ours, leaves) in zip(plain, dropped, strict=True):
        assert all(float(p.abs().max()) < 1e3 for p in ours)
        for by_parameter in leaves.values():
            assert all(float(data.abs().max()) < 1e3 for data in by_parameter.values())
        if isinstance(strategy, tw.AllReduce):
            assert all(torch.equal(a, b) for a, b in zip(weights, ours, strict=True))


class Square(nn.Module):
    """One parameter of some type, pulled towards zero."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.ones(40, dtype=dtype))

    def forward(self, rest: Tensor) -> Tensor:
        return rest + self.only.double().square().sum()


@every_talking
def test_parameters_of_several_types_are_trained(strategy: Strategy) -> None:
    def train(lane: LocalLane) -> list[float]:
        dtypes = (torch.bfloat16, torch.float32, torch.float64)  # as models in reduced precision have them
        model = nn.Sequential(*map(Square, dtypes))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.1)
        with attach(model, optimizer, strategy, lane):
            for _ in range(12):
                optimizer.zero_grad()
                model(torch.zeros(())).backward()
                optimizer.step()
        return [float(p.detach().abs().mean()) for p in model.parameters()]

    for means in run_threads(3, train):
        assert all(mean < 0.9 for mean in means)


class Only(nn.Module):
    """One parameter."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.zeros(shape, dtype=torch.float64))

    def forward(self, value: float) -> Tensor:
        return (self.only * value).sum()


@every_talking
@pytest.mark.parametrize(
    ("value", "shape"),
    [(0.0, (3,)), (1.0, (1,)), (1.0, (64, 2)), (5e-324, (64, 2)), (1e-310, (3,))],
    ids=["zero", "one number", "equal", "denormal", "fewer than workers"],
)
def test_odd_gradients_in_odd_models(strategy: Strategy, value: float, shape: tuple[int, ...]) -> None:
    """One number, fewer numbers than workers, all the same, none: the mean is what it should be."""

    def train(lane: LocalLane) -> tuple[Tensor, float]:
        model = Only(shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1e-12)  # which some exchange
        with attach(model, optimizer, strategy, lane) as link:
            for _ in range(5):
                optimizer.zero_grad()
                model(value).backward()
                optimizer.step()
            residual = link.state_dict()["leaves"].get("residual", {})
        return model.only.detach(), sum(float(each.sum()) for each in residual.values())

    everyone = run_threads(5, train)
    assert all(bool(weights.isfinite().all()) for weights, _ in everyone)
    outer = isinstance(strategy, tw.DiLoCo | tw.Trickle)  # whose outer step moves on by itself
    if strategy not in BY_THE_CLOCK and not outer:  # which may have numbers under way
        total = sum(float(weights.sum()) - waiting for weights, waiting in everyone) / 5
        assert total == pytest.approx(-5 * value * math.prod(shape), rel=1e-9, abs=1e-320)
