"""Narrow numbers: autocast with a GradScaler, models in bfloat16, several dtypes in one model.

Their sums round, so the comparison is with replicas whose gradients are averaged by hand.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.exact.compare import Arrays, arrays, same_bits
from tests.exact.place import Place, Scenario, average_gradients_, batch, in_threads, loss_of, net, sgd

STEPS = 6
WORLD_SIZE = 2  # the sum of two numbers is the same in either order


def autocast(place: Place, dtype: torch.dtype) -> Arrays:
    """fp32 weights, narrow matrix products, a scaled loss; one worker's third gradient overflows."""
    model = net().float()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with place.attach(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model, _floats(place.part(step)))
            if step == 2 and place.rank == place.world_size - 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return arrays(model) | {"scale": np.array(scaler.get_scale())}


def autocast_by_hand(dtype: torch.dtype) -> Arrays:
    replicas = [net().float() for _ in range(WORLD_SIZE)]
    optimizers = [sgd(model) for model in replicas]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in replicas]
    for step in range(STEPS):
        for model, optimizer, scaler, part in zip(replicas, optimizers, scalers, _parts(step), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model, _floats(part))
            if step == 2 and model is replicas[-1]:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
        average_gradients_(replicas)
        for model, optimizer, scaler in zip(replicas, optimizers, scalers, strict=True):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return arrays(replicas[0]) | {"scale": np.array(scalers[0].get_scale())}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_a_grad_scaler(dtype: torch.dtype) -> None:
    expected = autocast_by_hand(dtype)

    assert expected["scale"] == 512.0  # one step was skipped, by everyone
    for weights in in_threads(WORLD_SIZE, functools.partial(autocast, dtype=dtype)):
        assert same_bits(weights, expected)


class Cast(nn.Module):
    """Goes on in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def bfloat16_net() -> nn.Module:
    return nn.Sequential(Cast(torch.bfloat16), net().bfloat16(), Cast(torch.float64))


def mixed_net() -> nn.Module:
    """Layers in bfloat16, float64 and float32, in turn."""
    model = copy.deepcopy(net())
    first, middle, last = model[0].bfloat16(), model[2].double(), model[4].float()  # type: ignore[index]
    return nn.Sequential(
        Cast(torch.bfloat16), first, Cast(torch.float64), middle, nn.Tanh(), Cast(torch.float32), last
    )


def narrow(place: Place, make: Callable[[], nn.Module]) -> Arrays:
    model = make()
    dtypes = [p.dtype for p in model.parameters()]
    optimizer = sgd(model)
    with place.attach(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, place.part(step)).backward()
            assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == dtypes
            optimizer.step()
    return arrays(model)


@pytest.mark.parametrize("make", [bfloat16_net, mixed_net])
def test_every_dtype_travels_as_itself(make: Callable[[], nn.Module]) -> None:
    replicas = [make() for _ in range(WORLD_SIZE)]
    optimizers = [sgd(model) for model in replicas]
    for step in range(STEPS):
        for model, optimizer, part in zip(replicas, optimizers, _parts(step), strict=True):
            optimizer.zero_grad()
            loss_of(model, part).backward()
        average_gradients_(replicas)
        for optimizer in optimizers:
            optimizer.step()

    for weights in in_threads(WORLD_SIZE, functools.partial(narrow, make=make)):
        assert same_bits(weights, arrays(replicas[0]))


PRECISIONS: dict[str, Scenario] = {
    "autocast": functools.partial(autocast, dtype=torch.bfloat16),
    "bfloat16": functools.partial(narrow, make=bfloat16_net),
    "several dtypes": functools.partial(narrow, make=mixed_net),
}


def _parts(step: int) -> list[tuple[Tensor, Tensor]]:
    x, y = batch(step)
    return list(zip(x.chunk(WORLD_SIZE), y.chunk(WORLD_SIZE), strict=True))


def _floats(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return sample[0].float(), sample[1].float()
