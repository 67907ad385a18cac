"""Exact removals change nothing, in networks of every kind."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.apoptosis.networks import ACTIVATIONS, KINDS, make
from thinwire.apoptosis.calls import Call
from thinwire.apoptosis.criteria import add_constants, bounds, find_exact
from thinwire.apoptosis.moments import measure
from thinwire.apoptosis.operations import HOMOGENEOUS, ODD
from thinwire.apoptosis.proof import prove
from thinwire.apoptosis.surgery import Removal, cut, fold, kept_indices, named_tensors
from thinwire.apoptosis.trace import trace
from thinwire.apoptosis.units import Group


def groups_of(model: nn.Module, batch: Tensor) -> list[Group]:
    groups = trace(model, Call((batch,), {}))
    for group in groups:
        prove(model, group, Call((batch,), {}))
    return groups


def output(model: nn.Module, batch: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        result: Tensor = model(batch)
    model.train()
    return result


def remove(model: nn.Module, removals: list[Removal]) -> None:
    fold(model, removals)
    cut(model, (), kept_indices(model, removals))


@torch.no_grad()
def plant(model: nn.Module, group: Group, source: int, target: int, factor: float) -> None:
    """Make neuron `target` compute `factor` times what `source` computes before its activation."""
    tensors = named_tensors(model)
    for (name, dim), roles in group.roles.items():
        if roles & {"in", "along"}:
            rows, indices = tensors[name].detach().movedim(dim, 0), group.places[name, dim]
            # of a batch norm, only what comes after its statistics
            norm = any(name.startswith(f"{each}.") for each in group.norms.values())
            copied = name.endswith(("running_mean", "running_var"))
            scale = 1.0 if copied or (not norm and group.norms) else factor
            rows[indices[target]] = scale * rows[indices[source]]


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    width=st.integers(4, 9),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_exact_removals_change_nothing(
    kind: str, activation: str, width: int, seed: int, data: st.DataObject
) -> None:
    model, batch = make(kind, width, activation, seed)
    groups = [group for group in groups_of(model, batch) if not group.frozen]
    assert groups, "every kind has something to shrink"
    removals = []
    for group in groups:
        source, target, silent = data.draw(
            st.lists(st.integers(0, group.size - 1), min_size=3, max_size=3, unique=True)
        )
        factors = [1.0]
        if "recurrent" not in group.operations and len(group.norms) in (0, len(group.biases) or 1):
            factors += [2.5, 0.3] if group.operations <= HOMOGENEOUS else []
            factors += [-1.0] if group.operations <= ODD else []
        plant(model, group, source, target, data.draw(st.sampled_from(factors)))
        with torch.no_grad():
            for consumer in group.consumers:
                named_tensors(model)[consumer.weight][:, group.columns(consumer)[silent]] = 0.0
    before = output(model, batch)
    for group in groups:
        removals.append(find_exact(model, group).removal())
        assert len(removals[-1].dropped) >= 1
    remove(model, removals)
    after = output(model, batch)
    assert float((after - before).norm()) <= 1e-10 * float(before.norm())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert tuple(module.weight.shape) == (module.out_features, module.in_features)


@pytest.mark.parametrize(("activation", "factor"), [("relu", 3.0), ("tanh", -1.0), ("sigmoid", -1.0)])
def test_each_activation_has_its_rule(activation: str, factor: float) -> None:
    model, batch = make("mlp", 8, activation, 1)
    group = groups_of(model, batch)[0]
    plant(model, group, 2, 5, factor)
    before = output(model, batch)
    found = find_exact(model, group)
    assert set(found.into) in ({2}, {5})
    remove(model, [found.removal()])
    assert torch.allclose(output(model, batch), before, rtol=0, atol=1e-13)


@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "sigmoid"])
def test_a_scaled_duplicate_is_none_where_the_activation_is_not_homogeneous(activation: str) -> None:
    model, batch = make("mlp", 8, activation, 1)
    group = groups_of(model, batch)[0]
    plant(model, group, 2, 5, 3.0)
    assert not find_exact(model, group).into


@pytest.mark.parametrize("kind", ["mlp", "batch norm", "conv1d", "transformer"])
def test_constant_neurons_go_into_the_next_bias(kind: str) -> None:
    model, batch = make(kind, 6, "sigmoid", 3)
    groups = groups_of(model, batch)
    number, group = next((n, g) for n, g in enumerate(groups) if not g.frozen)
    with torch.no_grad():
        for (name, dim), roles in group.roles.items():
            if "in" in roles:
                named_tensors(model)[name].movedim(dim, 0)[group.places[name, dim][4]] = 0.0
    before = output(model, batch)
    table = measure(model, groups, [Call((batch,), {})])
    found = find_exact(model, group)
    add_constants(model, found, {each.weight: table[number, each.weight].mean for each in group.consumers})
    assert found.causes == {4: "constant"}
    remove(model, [found.removal()])
    assert torch.allclose(output(model, batch), before, rtol=0, atol=1e-12)


def test_a_constant_is_not_folded_into_a_convolution_that_pads() -> None:
    model, batch = make("conv2d", 6, "sigmoid", 3)
    groups = groups_of(model, batch)
    with torch.no_grad():
        model[0].weight[4] = 0.0  # type: ignore[index]
    table = measure(model, groups, [Call((batch,), {})])
    found = find_exact(model, groups[0])
    add_constants(model, found, {each.weight: table[0, each.weight].mean for each in groups[0].consumers})
    assert not found.into


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    activation=st.sampled_from(["relu", "tanh", "sigmoid"]),
    size=st.floats(1e-6, 1e-2),
)
def test_the_bound_holds_for_near_duplicates(seed: int, activation: str, size: float) -> None:
    model, batch = make("mlp", 8, activation, seed)
    group = groups_of(model, batch)[0]
    plant(model, group, 2, 5, 1.0)
    with torch.no_grad():
        model[0].weight[5] += size * torch.randn(6, generator=torch.Generator().manual_seed(seed))  # type: ignore[index]
    found = find_exact(model, group, tolerance=0.2)
    if not found.into:
        return
    following = copy.deepcopy(model[:4]).eval()  # type: ignore[index]
    before = following(batch)
    limit = sum(bounds(model, found, float(batch.norm(dim=1).max())).values())
    remove(model, [found.removal()])
    after = model[:4].eval()(batch)  # type: ignore[index]
    assert float((after - before).norm(dim=1).max().detach()) <= limit * (1 + 1e-9)


def test_the_last_neurons_stay() -> None:
    model, batch = make("mlp", 6, "relu", 0)
    group = groups_of(model, batch)[0]
    with torch.no_grad():
        model[3].weight.zero_()  # type: ignore[index]
    removal = find_exact(model, group).removal(min_width=2)
    assert len(removal.kept) == 2
