"""What cannot work is refused at once, with what to do instead: mostly under overlap="forward"."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

import thinwire as tw
from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, alone, batch, in_threads, loss_of, net, sgd
from thinwire.errors import UsageError
from thinwire.strategies.base import Overlap

FORWARD = tw.AllReduce(overlap="forward")


def backward(model: nn.Module, step: int = 0) -> None:
    loss_of(model, batch(step)).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


class Own(SGD):
    """An optimizer of the user's."""


@pytest.mark.parametrize("make", [LBFGS, Own], ids=["LBFGS", "own"])
def test_an_optimizer_that_may_couple_parameters(make: type[LBFGS] | type[Own]) -> None:
    model = net()
    with pytest.raises(UsageError, match=f"{make.__name__} may not survive") as caught:
        tw.attach(model, make(model.parameters()), FORWARD)
    assert "overlap='backward'" in caught.value.hint
    tw.attach(model, make(model.parameters()), tw.AllReduce()).detach()


def test_a_model_that_is_compiled_as_a_whole() -> None:
    wrapped, in_place = torch.compile(net(), backend="eager"), net()
    in_place.compile(backend="eager")
    for model in (wrapped, in_place):
        assert isinstance(model, nn.Module)
        with pytest.raises(UsageError, match="compiled as a whole") as caught:
            tw.attach(model, sgd(model), FORWARD)
        assert "block by block" in caught.value.hint


def test_a_closure() -> None:
    model = net()
    optimizer = sgd(model)
    with tw.attach(model, optimizer, FORWARD):
        backward(model)
        with pytest.raises(UsageError, match="cannot step with a closure"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(UsageError, match="cannot step with a closure"):
            optimizer.step(closure=lambda: 0.0)


def test_a_second_backward_before_the_step() -> None:
    model = net()
    optimizer = sgd(model)
    with tw.attach(model, optimizer, FORWARD):
        backward(model)
        with pytest.raises(UsageError, match=r"a second backward before optimizer\.step") as caught:
            backward(model)
        assert "link.no_sync()" in caught.value.hint


def test_gradients_that_were_never_sent() -> None:
    """A backward inside no_sync after, or without, one that sends."""
    model = net()
    optimizer = sgd(model)
    with tw.attach(model, optimizer, FORWARD) as link:
        backward(model)
        with link.no_sync():
            backward(model)
        for step in (optimizer.step, lambda: link.clip_grad_norm_(1.0)):
            with pytest.raises(UsageError, match=r"6 parameters, such as \d.\w+, have gradients") as caught:
                step()
            assert "link.no_sync()" in caught.value.hint
    after = gradients(model)  # which are the user's own again
    model.zero_grad()
    backward(model)
    assert all(torch.equal(a, 2 * g) for a, g in zip(after, gradients(model), strict=True))


def test_gradients_that_are_kept_as_zeros() -> None:
    model = net()
    optimizer = sgd(model)
    with tw.attach(model, optimizer, FORWARD):
        for each in (model, optimizer):
            with pytest.raises(UsageError, match="keeps no gradients"):
                each.zero_grad(set_to_none=False)
    for each in (model, optimizer):
        each.zero_grad(set_to_none=False)


def test_a_parameter_written_to_before_its_update() -> None:
    model = net()
    optimizer = sgd(model)
    with tw.attach(model, optimizer, FORWARD) as link:
        backward(model)
        optimizer.step()
        with torch.no_grad():
            model[2].weight.clamp_(-0.1, 0.1)  # type: ignore[index]
        with pytest.raises(UsageError, match=r"2\.weight was written to after optimizer\.step") as caught:
            backward(model, 1)
        assert "link.synchronize()" in caught.value.hint
        with pytest.raises(UsageError, match=r"2\.weight was written to"):  # it stays wrong
            link.detach()


class Sly(nn.Module):
    """Uses, from some step on, a weight without its module, which the first forward did not show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()
        self.sly = False

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.inner.weight if self.sly else self.inner(x)
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("quietly", [False, True], ids=["sync", "no_sync"])
def test_a_weight_used_before_its_update(quietly: bool) -> None:
    """With `quietly` the backward that sends is innocent, and its forward asks for the update."""
    model = Sly()
    optimizer = sgd(model)
    link = tw.attach(model, optimizer, FORWARD, bucket_bytes=64)
    backward(model)
    optimizer.step()
    model.sly = True
    if quietly:
        with link.no_sync():
            backward(model)
        model.sly = False
    with pytest.raises(UsageError, match=r"inner\.weight was used before its update") as caught, link:
        backward(model)
    assert "call modules" in caught.value.hint


def test_parameters_left_to_another_optimizer_are_warned_about() -> None:
    model = net()
    with pytest.warns(UserWarning, match=r"2 parameter\(s\) of the model .* not in the optimizer"):
        tw.attach(model, sgd(model[:-1]), FORWARD).detach()  # type: ignore[index]


@pytest.mark.parametrize("strategy", [FORWARD, tw.AllReduce(), tw.Silent()], ids=repr)
def test_attaching_twice(strategy: tw.AllReduce | tw.Silent) -> None:
    model = net()
    optimizer = sgd(model)
    part = nn.Sequential(model[2])  # type: ignore[index]
    with tw.attach(model, optimizer, strategy):
        for again in (model, part):
            with pytest.raises(UsageError, match="weight is already attached") as caught:
                tw.attach(again, sgd(again), tw.AllReduce())
            assert "link.detach()" in caught.value.hint
        with pytest.raises(UsageError, match=r"parameter 0\.weight is already attached"):
            tw.attach(model, optimizer, strategy)
    with tw.attach(model, optimizer, strategy):  # and now it is free again, as it is after an error
        pass
    with pytest.raises(RuntimeError, match="out of luck"), tw.attach(model, optimizer, strategy):
        raise RuntimeError("out of luck")
    tw.attach(part, sgd(part), strategy).detach()


def test_a_frozen_backbone_may_be_shared() -> None:
    backbone = net()
    backbone.requires_grad_(False)
    heads = [nn.Sequential(backbone, nn.Linear(1, 1).double()) for _ in range(2)]
    with tw.attach(heads[0], sgd(heads[0]), tw.AllReduce()), tw.attach(heads[1], sgd(heads[1]), tw.Silent()):
        pass


def thaw(model: nn.Module, optimizer: SGD) -> None:
    model[0].requires_grad_(True)  # type: ignore[index]


def add(model: nn.Module, optimizer: SGD) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize("change", [thaw, add])
def test_a_parameter_that_nobody_would_send(change: Callable[[nn.Module, SGD], None]) -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = sgd(model)
    with tw.attach(model, optimizer, tw.AllReduce()):
        backward(model)
        optimizer.step()
        change(model, optimizer)
        backward(model)
        with pytest.raises(UsageError, match="nobody would send it") as caught:
            optimizer.step()
        assert "attach again" in caught.value.hint


def frozen_midway(place: Place) -> Arrays:
    model = net()
    optimizer = sgd(model)
    with place.attach(model, optimizer):
        for step in range(6):
            if step == 3:
                model[0].requires_grad_(False)  # type: ignore[index]
            optimizer.zero_grad()
            loss_of(model, place.part(step)).backward()
            optimizer.step()
    return arrays(model)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_freezing_a_layer_is_fine(overlap: Overlap) -> None:
    everyone = in_threads(2, frozen_midway, overlap)
    assert difference(everyone[0], alone(frozen_midway)) < 1e-12
    assert same_bits(*everyone)
