"""What attach is given: refused in words, compared between workers, and advised upon."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import thinwire as tw
from tests.contract.training import model_and_optimizer, step_once
from tests.worlds import run_threads
from thinwire.errors import PeerDiffers, SettingError, UsageError
from thinwire.strategies.base import Strategy
from thinwire.wire.backend import has_world
from thinwire.wire.local import LocalLane

MODEL, OPTIMIZER = model_and_optimizer()
GIVEN = {"model": MODEL, "optimizer": OPTIMIZER, "strategy": tw.AllReduce()}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": OPTIMIZER, "optimizer": MODEL}, r"model must be a torch.nn.Module, got a SGD"),
        ({"model": None}, r"model must be a torch.nn.Module, got None"),
        ({"optimizer": tw.AllReduce(), "strategy": OPTIMIZER}, r"or a list of them, got a AllReduce"),
        ({"optimizer": MODEL.parameters()}, r"or a list of them, got a generator"),
        ({"optimizer": []}, r"optimizer must be at least one, got \[\]"),
        ({"strategy": OPTIMIZER}, r"strategy must be a strategy object, got a SGD"),
        ({"strategy": tw.AllReduce}, r"strategy must be a strategy object, got <class"),
        ({"strategy": "gtopk"}, r"strategy must be a strategy object, got 'gtopk'"),
        ({"timeout_s": "5"}, r"timeout_s must be a positive number of seconds, got '5'"),
        ({"timeout_s": float("inf")}, r"timeout_s must be a positive number of seconds, got inf"),
        ({"timeout_s": True}, r"timeout_s must be a positive number of seconds, got True"),
        ({"bucket_bytes": "1MB"}, r"bucket_bytes must be a positive whole number of bytes, got '1MB'"),
        ({"bucket_bytes": 0}, r"bucket_bytes must be a positive whole number of bytes, got 0"),
        ({"num_steps": 1e4}, r"num_steps must be a positive whole number of steps, got 10000\.0"),
        ({"buffers": ["rank0"]}, r"buffers must be one of 'rank0', 'average', 'local', got \['rank0'\]"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        tw.attach(**{**GIVEN, **changed})


def test_a_lazy_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2))
    with pytest.raises(UsageError, match=r"parameter 1\.weight has no shape yet") as caught:
        tw.attach(model, SGD(model.parameters(), lr=0.1), tw.AllReduce())
    assert "one batch" in caught.value.hint


@pytest.mark.parametrize("strategy", [tw.GossipGraD(), tw.StochasticGradientPush(), tw.TopK()], ids=repr)
def test_complex_parameters_are_refused_where_numbers_are_compared(strategy: Strategy) -> None:
    model = nn.Linear(30, 20, dtype=torch.complex64)
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingError, match=rf"is torch.complex64; {type(strategy).__name__} sends real"):
        tw.attach(model, optimizer, strategy)
    tw.attach(model, optimizer, tw.AllReduce()).detach()


def test_complex_gradients_are_averaged_and_checked() -> None:
    def work(lane: LocalLane) -> torch.Tensor:
        model = nn.Linear(3, 1, bias=False, dtype=torch.complex64)
        optimizer = SGD(model.parameters(), lr=0.1)
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane):
            before = model.weight.detach().clone()
            model(torch.full((1, 3), lane.rank + 1.0j)).abs().square().sum().backward()
            optimizer.step()
            assert not torch.equal(before, model.weight)
            optimizer.zero_grad()
            (model(torch.ones(1, 3, dtype=torch.complex64)).imag * torch.nan).sum().backward()
            with pytest.raises(tw.errors.NumericError, match="weight on worker 0"):
                optimizer.step()
        return model.weight.detach()

    one, other = run_threads(2, work)
    assert torch.equal(one, other)


def another_rate(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.2, momentum=0.9)


def another_class(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "there"),
    [
        (another_rate, "optimizer SGD with learning rate 0.2"),
        (another_class, "optimizer AdamW with learning rate 0.1"),
    ],
)
def test_another_optimizer_on_one_rank_is_named_by_all(make: Any, there: str) -> None:
    def work(lane: LocalLane) -> PeerDiffers:
        model, optimizer = model_and_optimizer()
        with pytest.raises(PeerDiffers) as caught:
            tw.attach(model, make(model) if lane.rank == 1 else optimizer, tw.AllReduce(), process_group=lane)
        return caught.value

    for error in run_threads(3, work):
        assert error.rank == 1
        here = "optimizer SGD with learning rate 0.1"
        assert f"rank 0 has '{here}' where rank 1 has '{there}'" in error.message


@pytest.mark.parametrize("num_steps", [None, 4000])
def test_too_few_steps_for_a_density_are_said(
    num_steps: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first step as far as it is known then, and once."""
    before = list[str]()

    def work(lane: LocalLane) -> None:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, tw.GTopK(), process_group=lane, num_steps=num_steps) as link:
            link.all_reduce([0.0])  # the first worker has attached, and said what it says
            before.extend(caplog.messages if lane.rank else [])
            for step in range(3):
                step_once(model, optimizer, step, lane.rank)

    with caplog.at_level(logging.WARNING, logger="thinwire"):
        run_threads(2, work)
    steps = "8,000" if num_steps is None else "4,000"
    assert [f"times in {steps} steps" in message for message in before] == [True]
    at_the_end = ["times in 3 steps" in message for message in caplog.messages[1:]]
    assert at_the_end == ([True] if num_steps is None else [])


def test_a_share_says_what_it_cost_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    before = list[str]()

    def work(lane: LocalLane) -> None:
        model, optimizer = model_and_optimizer()
        with tw.attach(model, optimizer, tw.GossipGraD(share="auto"), process_group=lane) as link:
            link.all_reduce([0.0])
            before.extend(caplog.messages if lane.rank else [])
            step_once(model, optimizer, 0, lane.rank)

    with caplog.at_level(logging.WARNING, logger="thinwire"):
        run_threads(2, work)
    assert ["points of accuracy" in message for message in before] == [True]


def test_enough_steps_and_a_world_of_one_need_no_advice(caplog: pytest.LogCaptureFixture) -> None:
    def work(lane: LocalLane) -> None:
        model, optimizer = model_and_optimizer()
        tw.attach(model, optimizer, tw.GTopK(), process_group=lane, num_steps=8000).detach()

    with caplog.at_level(logging.WARNING, logger="thinwire"):
        run_threads(2, work)
        run_threads(1, work)
        model, optimizer = model_and_optimizer()
        tw.attach(model, optimizer, tw.GTopK()).detach()
    assert not caplog.messages


# -- the environment --------------------------------------------------------------------------------

WORLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*WORLD, "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
def test_a_world_is_what_any_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_world()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not has_world()
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    assert has_world()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_world_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name, value in WORLD.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"WORLD_SIZE is 2, and {missing} is not set") as caught:
        tw.attach(**GIVEN)  # type: ignore[arg-type]
    assert "torchrun" in caught.value.hint


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("RANK", "2", "RANK must be below WORLD_SIZE"), ("MASTER_PORT", "x", "MASTER_PORT must be a whole")],
)
def test_a_wrong_world_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    for key, right in {**WORLD, name: value}.items():
        monkeypatch.setenv(key, value if key == name else right)
    with pytest.raises(SettingError, match=message):
        tw.attach(**GIVEN)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_processes_that_a_launcher_left_alone_are_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "4")
    with pytest.warns(UserWarning, match=f"{name} is 4 and WORLD_SIZE is not set: each worker trains alone"):
        tw.attach(**GIVEN).detach()  # type: ignore[arg-type]
