"""Neurons that the others make up for, on data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.apoptosis.networks import KINDS, make
from thinwire.apoptosis.calls import Call
from thinwire.apoptosis.elimination import _Consumer, _solve, eliminate
from thinwire.apoptosis.moments import empty_table, measure
from thinwire.apoptosis.proof import prove
from thinwire.apoptosis.surgery import Removal, cut, fold, kept_indices
from thinwire.apoptosis.trace import trace


def shrink(model: nn.Module, data: Tensor, budget: float) -> list[Removal]:
    call = Call((data,), {})
    groups = trace(model, call)
    for group in groups:
        prove(model, group, call)
    table = measure(model, groups, [call])
    found = []
    for number, group in enumerate(groups):
        if (number, group.consumers[0].weight if group.consumers else "") in table:
            moments = {each.weight: table[number, each.weight] for each in group.consumers}
            removal = eliminate(model, group, moments, budget=budget, min_width=1)
            found += [removal] if removal is not None else []
    fold(model, found)
    cut(model, (), kept_indices(model, found))
    return found


def low_rank(seed: int, size: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A linear network whose wide middle layer has four independent neurons."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, size), nn.Identity(), nn.Linear(size, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    train, test = (torch.randn(600, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    return model, train, test


@pytest.mark.parametrize("size", [20, 150])
def test_a_layer_of_rank_four_keeps_four_neurons_and_a_bias(size: int) -> None:
    model, train, test = low_rank(0, size)
    expected = model(test).detach()
    shrink(model, train, 1e-2)
    assert model[0].out_features == 4
    assert float((model(test).detach() - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("budget", [0.03, 0.2])
def test_the_change_stays_near_the_budget_on_data_that_was_not_seen(kind: str, budget: float) -> None:
    model, _ = make(kind, 24, "relu", 0)
    shape = (2, 6, 6) if kind == "conv2d" else (2, 6) if kind == "conv1d" else (6,)
    generator = torch.Generator().manual_seed(1)
    train, test = (torch.randn(800, *shape, generator=generator, dtype=torch.float64) for _ in range(2))
    model.eval()
    with torch.no_grad():
        expected = model(test)
    model.train()
    found = shrink(model, train, budget)
    model.eval()
    with torch.no_grad():
        change = float((model(test).detach() - expected).norm() / (expected - expected.mean(0)).norm())
    assert all(removal.change <= budget for removal in found)
    # every layer is bounded for itself; a layer may come after another, or after itself
    assert change <= 3.0 * budget * max(1, len(found))


def test_dead_neurons_go_first_and_are_named() -> None:
    model, batch = make("mlp", 12, "relu", 0)
    with torch.no_grad():
        model[0].bias[[2, 7]] = -1e3  # type: ignore[index]
    found = shrink(model, batch.repeat(20, 1), 1e-6)
    assert found[0].causes == {"dead": 2}
    assert found[0].dropped.tolist() == [2, 7]


def test_few_samples_are_not_trusted() -> None:
    """With as many samples as neurons, any neuron is a combination of the others."""
    model, batch = make("mlp", 40, "tanh", 0)
    found = shrink(model, batch, 0.05)  # 32 samples
    assert all(removal.group.name != "0" for removal in found)


def test_moments_add_up_over_calls_and_workers() -> None:
    model, _ = make("conv2d", 6, "relu", 0)
    data = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    groups = trace(model, Call((data,), {}))
    whole = measure(model, groups, [Call((data,), {})])
    halves = [measure(model, groups, [Call((part,), {})]) for part in data.split(4)]
    summed = empty_table(model, groups)
    for key, moments in summed.items():
        moments.set_(halves[0][key].flat() + halves[1][key].flat())
        assert torch.allclose(moments.second, whole[key].second, rtol=1e-5)
        assert moments.variance == pytest.approx(whole[key].variance)


@pytest.mark.parametrize("batch_first", [True, False])
def test_in_a_recurrent_layer_an_error_counts_once_for_every_moment(batch_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 8, batch_first=batch_first).double()
    data = torch.randn(6, 9, 3, dtype=torch.float64)
    moments = 9 if batch_first else 6
    groups = trace(model, Call((data,), {}))
    groups[0].frozen = ""
    table = measure(model, groups, [Call((data,), {})])
    with torch.no_grad():
        states = model(data)[0].flatten(0, 1)
    expected = states.T @ states / len(states) * moments
    assert torch.allclose(table[0, "weight_hh_l0"].second[:-1, :-1], expected)


def test_neurons_that_are_all_alike_go_in_single_precision_too() -> None:
    """Rounding of the sums is then larger than what is left of a neuron beside the others."""
    model, train, test = low_rank(0, 150)
    model, train, test = model.float(), train.float(), test.float()
    expected = model(test).detach()
    shrink(model, train, 1e-2)
    assert len(model.get_parameter("0.weight")) < 15
    assert float((model(test).detach() - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("constants", [True, False])
def test_costs_after_a_takeover_are_known_before_it_is_made(constants: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 30 + constants, generator=generator, dtype=torch.float64)
    matrix, weights = rows.T @ rows, torch.randn(30, 7, generator=generator, dtype=torch.float64)
    inverse = torch.linalg.inv(matrix)
    view = _Consumer(matrix, inverse, inverse, weights @ weights.T, 1.0, 200.0, 1e-6)
    gone = torch.tensor([3, 4, 20])
    stay = torch.tensor([number for number in range(30) if number not in gone])
    takeover = view.without(gone, stay)
    expected = view.costs_after(takeover, 27)
    view.take_over_(takeover)
    assert torch.allclose(view.costs(27), expected, rtol=1e-10)
    kept = torch.cat([stay, torch.arange(30, 30 + constants)])
    left = matrix[kept[:, None], kept]
    assert torch.allclose(view.inverse, torch.linalg.inv(left), rtol=1e-8)


@pytest.mark.parametrize("num_gone", [3, 25])
@pytest.mark.parametrize("constants", [True, False])
def test_neurons_are_made_up_for_by_least_squares(num_gone: int, constants: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(200, 30 + constants, generator=generator, dtype=torch.float64)
    matrix = rows.T @ rows
    inverse = torch.linalg.inv(matrix)
    view = _Consumer(matrix, inverse, inverse, torch.eye(30), 1.0, 200.0, 1e-6)
    kept, dropped = torch.arange(num_gone, 30), torch.arange(num_gone)
    fold = _solve(view, kept, dropped)
    expected = torch.linalg.lstsq(rows[:, num_gone:], rows[:, :num_gone]).solution.T
    assert torch.allclose(fold.coefficients, expected[:, : len(kept)], rtol=1e-9, atol=1e-12)
    assert torch.allclose(fold.constants, expected[:, -1] if constants else torch.zeros(1).double())
