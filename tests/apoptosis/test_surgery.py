"""After the cut, training goes on as that of a small network that was built directly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.apoptosis.networks import KINDS, make
from thinwire.apoptosis.architecture import set_shapes
from thinwire.apoptosis.calls import Call
from thinwire.apoptosis.proof import prove
from thinwire.apoptosis.surgery import Removal, Snapshot, check_state, cut, kept_indices, named_tensors
from thinwire.apoptosis.trace import trace
from thinwire.errors import UsageError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the same dropout
        optimizer.zero_grad()
        (model(batch) - batch.flatten(1)[:, :3]).square().mean().backward()
        optimizer.step()


def removals(model: nn.Module, batch: Tensor) -> list[Removal]:
    """Every third neuron of every group goes."""
    groups = trace(model, Call((batch,), {}))
    for group in groups:
        prove(model, group, Call((batch,), {}))
    return [
        Removal(group=group, kept=torch.tensor([i for i in range(group.size) if i % 3 != 1]))
        for group in groups
        if not group.frozen
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_trajectory_is_that_of_a_small_network(kind: str, name: str) -> None:
    model, batch = make(kind, 8, "tanh", 0)
    optimizer = OPTIMIZERS[name](model.parameters())
    for number in range(3):
        step(model, optimizer, batch, number)
    kept = kept_indices(model, removals(model, batch))
    cut(model, [optimizer], kept)

    small, _ = make(kind, 8, "tanh", 1)
    set_shapes(small, model.state_dict())
    small.load_state_dict(model.state_dict())
    following = OPTIMIZERS[name](small.parameters())
    following.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3, 7):
        step(model, optimizer, batch, number)
        step(small, following, batch, number)
    for (key, ours), theirs in zip(model.state_dict().items(), small.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), key


def test_parameters_hooks_frozen_flags_and_steps_survive() -> None:
    model, batch = make("conv2d", 9, "relu", 0)
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    calls: list[torch.Size] = []
    model[4].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.shape))  # type: ignore[index]
    step(model, optimizer, batch, 0)
    before, averages = dict(model.named_parameters()), optimizer.state[model[4].weight]["exp_avg"].clone()  # type: ignore[index]
    step(model, optimizer, batch, 1)
    gradient = model[4].weight.grad.clone()  # type: ignore[index]
    averages = optimizer.state[model[4].weight]["exp_avg"].clone()  # type: ignore[index]
    kept = kept_indices(model, removals(model, batch))
    cut(model, [optimizer], kept)
    rows, columns = kept["4.weight"][0], kept["4.weight"][1]
    assert rows is not None
    assert columns is not None
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert torch.equal(model[4].weight.grad, gradient[rows][:, columns])  # type: ignore[index]
    state = optimizer.state[model[4].weight]  # type: ignore[index]
    assert torch.equal(state["exp_avg"], averages[rows][:, columns])
    assert float(state["step"]) == 2
    values = {name: p.detach().clone() for name, p in after.items()}
    step(model, optimizer, batch, 2)
    assert calls[-1] == model[4].weight.shape  # type: ignore[index]
    for name, parameter in after.items():
        changed = (parameter != values[name]).any()
        assert bool(changed) == (name != "0.weight"), name
    assert not model[0].weight.requires_grad  # type: ignore[index]
    assert all(module.training for module in model.modules())


def test_a_snapshot_brings_everything_back() -> None:
    model, batch = make("batch norm", 9, "relu", 0)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, batch, 0)
    snapshot = Snapshot.of(model, [optimizer])
    straight = {name: t.detach().clone() for name, t in named_tensors(model).items()}
    states = dict(model.named_parameters())
    moments = {name: optimizer.state[p]["exp_avg_sq"].clone() for name, p in states.items()}
    cut(model, [optimizer], kept_indices(model, removals(model, batch)))
    step(model, optimizer, batch, 1)
    snapshot.restore(model, [optimizer])
    for name, tensor in named_tensors(model).items():
        assert torch.equal(tensor, straight[name])
    assert all(torch.equal(optimizer.state[p]["exp_avg_sq"], moments[name]) for name, p in states.items())
    assert model[0].out_features == 9  # type: ignore[index]
    step(model, optimizer, batch, 1)


def test_an_optimizer_whose_state_cannot_follow_is_named_before_anything_changes() -> None:
    model, batch = make("mlp", 9, "relu", 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["history"] = torch.zeros(7, 100)  # type: ignore[index]
    kept = kept_indices(model, removals(model, batch))
    with pytest.raises(UsageError, match=r"SGD keeps history of 0\.weight with shape \(7, 100\)"):
        check_state(model, [optimizer], kept)
    assert model[0].weight.shape == (9, 6)  # type: ignore[index]
