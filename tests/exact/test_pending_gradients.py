"""overlap="forward": a loop written for plain torch reads, clips and scales gradients, and gets the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import thinwire as tw
from tests.exact.compare import Arrays, arrays, difference, same_bits
from tests.exact.place import Place, alone, in_threads, loss_of, net, sgd


def clipping(place: Place) -> Arrays:
    """torch's clip_grad_norm_, a norm printed before, and clip_grad_value_."""
    model = net()
    optimizer, seen = sgd(model), list[torch.Tensor]()
    with place.attach(model, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, place.part(step)).backward()
            last = list(model.parameters())[-1].grad
            assert last is not None
            seen.append(last.norm().clone())
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            if step == 3:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
    return arrays(model) | {f"norm {i}": norm.detach().numpy() for i, norm in enumerate(seen)}


def averaging(place: Place) -> Arrays:
    """A moving average by torch's own, and one by hand, of a model whose last step is still under way."""
    model = net()
    optimizer = sgd(model)
    own = copy.deepcopy(model)
    with place.attach(model, optimizer):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, place.part(step)).backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                for mine, theirs in zip(own.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.3)
    return arrays(average.module) | {f"own {name}": data for name, data in arrays(own).items()}


@pytest.mark.parametrize("train", [clipping, averaging], ids=lambda f: f.__name__)
def test_a_plain_loop_gives_what_one_worker_gives(train: Callable[[Place], Arrays]) -> None:
    everyone = in_threads(2, train, "forward")
    assert difference(everyone[0], alone(train)) < 1e-12
    assert same_bits(*everyone)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("unscale", [False, True], ids=["step", "unscale and step"])
def test_a_grad_scaler_skips_what_overflows(fused: bool, unscale: bool) -> None:
    def train(model: nn.Module, optimizer: AdamW) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.full((2, 6), 1e30 if step == 3 else 0.5 + step)
            scaler.scale(model(x).square().sum()).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return float(scaler.get_scale())

    plain = net().float()
    attached = copy.deepcopy(plain)
    expected = train(plain, AdamW(plain.parameters(), fused=fused))
    optimizer = AdamW(attached.parameters(), fused=fused)
    with tw.attach(attached, optimizer, tw.AllReduce(overlap="forward")):
        assert train(attached, optimizer) == expected
    assert same_bits(arrays(plain), arrays(attached))
