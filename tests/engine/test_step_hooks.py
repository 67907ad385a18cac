"""Steps with closures, of several optimizers, and of none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import thinwire as tw
from tests.contract.training import BUCKET_BYTES, batch, model_and_optimizer
from tests.worlds import run_threads
from thinwire.engine.step_hooks import IdleWatch
from thinwire.errors import NumericError, SettingError, UsageError
from thinwire.strategies.base import Strategy
from thinwire.wire.local import LocalLane

STEPS = 6
SOME = [
    tw.AllReduce(),
    tw.GossipGraD(),
    tw.GossipGraD(exchange="weights+momentum", payload="bf16"),
    tw.GTopK(density=0.05),
]
some_strategies = pytest.mark.parametrize("strategy", SOME, ids=repr)
attach = functools.partial(tw.attach, bucket_bytes=BUCKET_BYTES)


def backward(model: nn.Module, step: int, rank: int) -> float:
    x, y = batch(step, rank)
    model.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return float(loss.detach())


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> bool:
    pairs = zip(chain(*ours), chain(*theirs), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# -- closures ---------------------------------------------------------------------------------------


def with_closure(lane: LocalLane, strategy: Strategy, how: str) -> list[Tensor]:
    model, optimizer = model_and_optimizer()
    with attach(model, optimizer, strategy, process_group=lane):
        for step in range(STEPS):
            closure = functools.partial(backward, model, step, lane.rank)
            if how == "plain":
                closure()
                optimizer.step()
            elif how == "keyword":
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
    return weights(model)


@some_strategies
@pytest.mark.parametrize("how", ["argument", "keyword"])
def test_exchanges_hide_behind_a_closure_too(strategy: Strategy, how: str) -> None:
    """They come back after it: then the gradients, and all that follows, are the same bits as without one."""
    train = functools.partial(with_closure, strategy=strategy)
    plain, closed = (run_threads(2, functools.partial(train, how=each)) for each in ("plain", how))
    assert same(plain, closed)


def test_a_closure_may_be_called_several_times() -> None:
    def work(lane: LocalLane) -> list[Tensor]:
        model, _ = model_and_optimizer()
        optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)
        with attach(model, optimizer, tw.AllReduce(), process_group=lane) as link:
            for step in range(3):
                optimizer.step(functools.partial(backward, model, step, lane.rank))
            assert link.stats.steps == 3
        return weights(model)

    one, other = run_threads(2, work)
    assert same([one], [other])


def test_gradients_of_a_closure_that_are_not_finite_are_refused() -> None:
    def work(lane: LocalLane) -> None:
        model, optimizer = model_and_optimizer()

        def closure() -> float:
            loss = (model(batch(0, lane.rank)[0]) * (torch.nan if lane.rank == 1 else 1.0)).sum()
            loss.backward()
            return float(loss.detach())

        before = weights(model)
        with (
            pytest.raises(NumericError, match="on worker 1 is not finite"),
            attach(model, optimizer, tw.AllReduce(), process_group=lane),
        ):
            optimizer.step(closure)
        assert same([before], [weights(model)])

    run_threads(2, work)


# -- several optimizers -----------------------------------------------------------------------------

Make = Callable[[nn.Module], list[Optimizer]]
sgd = functools.partial(SGD, lr=0.1, momentum=0.9)


def together(model: nn.Module) -> list[Optimizer]:
    return [sgd(model.parameters())]


def apart(model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [sgd(parameters[1::2]), sgd(parameters[::2])]


def trained(lane: LocalLane, strategy: Strategy, make: Make, *, joined: bool = False) -> list[Tensor]:
    model, _ = model_and_optimizer()
    optimizers = make(model)
    with attach(model, optimizers, strategy, process_group=lane) as link:
        with link.join() if joined else torch.enable_grad():
            for step in range(STEPS - (joined and lane.rank)):
                backward(model, step, lane.rank)
                for optimizer in optimizers:
                    optimizer.step()
        assert link.stats.steps == STEPS
    return weights(model)


@some_strategies
def test_several_optimizers_are_one_step(strategy: Strategy) -> None:
    one, two = (
        run_threads(2, functools.partial(trained, strategy=strategy, make=make)) for make in (together, apart)
    )
    assert same(one, two)


def test_several_optimizers_end_a_join_alike() -> None:
    one, other = run_threads(2, functools.partial(trained, strategy=tw.AllReduce(), make=apart, joined=True))
    assert same([one], [other])


def test_an_optimizer_that_leaves_a_step_out_does_not_stop_the_others() -> None:
    """As a GradScaler makes it do."""
    model, _ = model_and_optimizer()
    one, other = apart(model)
    with attach(model, [one, other], tw.GossipGraD()) as link:
        for step in range(4):
            backward(model, step, 0)
            one.step()
            if step != 1:
                other.step()
        assert link.stats.steps == 4


def test_optimizers_that_share_a_parameter_are_refused() -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(SettingError, match="some that share a parameter"):
        tw.attach(model, [optimizer, AdamW(model.parameters())], tw.AllReduce())


def test_one_optimizer_under_forward_overlap() -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(UsageError, match="one optimizer, got 2"):
        tw.attach(model, apart(model), tw.AllReduce(overlap="forward"))


class Wrapper(Optimizer):
    """As Accelerate's: an optimizer by name, with the real one inside."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[object]:  # type: ignore[override]
        return self.optimizer.param_groups  # type: ignore[return-value]

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


def test_a_wrapped_optimizer_is_unwrapped_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = model_and_optimizer()
    wrapped = Wrapper(optimizer)
    with pytest.raises(SettingError, match="optimizer Wrapper has no step hooks") as caught:
        tw.attach(model, wrapped, tw.AllReduce())
    assert "the torch.optim optimizer that it wraps" in caught.value.hint
    monkeypatch.setattr(Wrapper, "__module__", "accelerate.optimizer")
    with tw.attach(model, wrapped, tw.AllReduce()) as link:
        backward(model, 0, 0)
        wrapped.step()
        assert link.stats.steps == 1


# -- none -------------------------------------------------------------------------------------------


def by_hand(model: nn.Module) -> Iterator[None]:
    while True:
        for p in model.parameters():
            assert p.grad is not None
            p.data.sub_(p.grad)  # which leaves its version as it was
        yield


def by_another(model: nn.Module) -> Iterator[None]:
    other = sgd(model.parameters())
    while True:
        other.step()
        yield


@pytest.mark.parametrize("trains", [by_hand, by_another])
def test_a_training_without_the_attached_optimizer_is_warned_about(
    trains: Callable[[nn.Module], Iterator[None]],
) -> None:
    def work(lane: LocalLane) -> int:
        model, optimizer = model_and_optimizer()
        with attach(model, optimizer, tw.GossipGraD(), process_group=lane) as link:
            training = trains(model)
            for step in range(5):
                backward(model, step, lane.rank)
                next(training)
            return link.stats.steps

    with pytest.warns(UserWarning, match="the attached optimizer does not step") as caught:
        assert run_threads(2, work) == [0, 0]
    assert len(caught) == 2  # once by each worker


def test_accumulating_and_loading_is_no_training() -> None:
    model, optimizer = model_and_optimizer()
    watch = IdleWatch([optimizer], tw.GossipGraD())
    for step in range(4):
        backward(model, step, 0)
        if step == 2:
            model.load_state_dict(model_and_optimizer(seed=1)[0].state_dict())
    watch.stop()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
