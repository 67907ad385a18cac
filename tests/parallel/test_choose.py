"""The automatic choice of layers and groups, from sizes and a network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.parallel import HybridPlan, Network
from thinwire.parallel.choose import Choice, Costs
from thinwire.planner.balance import best_groups

THIN = Network(bits_per_s=1e9, latency_s=1e-4)
HEAD = "layer placement groups weights of a worker data-parallel as planned saved"


def planned(model: nn.Module, rows: int, *, workers: int = 16, **settings: object) -> HybridPlan:
    """A dry run with so many rows per worker."""
    into = next(module.in_features for module in model.modules() if isinstance(module, nn.Linear))
    return tw.parallel.hybridize(
        model,
        groups="auto",
        layers="auto",
        example=torch.zeros(rows, into),
        network=THIN,
        workers=workers,
        dry_run=True,
        **settings,  # type: ignore[arg-type]  # one of them
    )


@pytest.mark.parametrize(("workers", "minibatch", "side"), [(64, 256, 4096), (16, 512, 2048), (16, 64, 1024)])
def test_a_square_layer_gets_the_groups_of_das(workers: int, minibatch: int, side: int) -> None:
    """The paper leaves out what goes back to rows, so groups may be next to each other."""
    [layer] = planned(nn.Sequential(nn.Linear(side, side)), minibatch // workers, workers=workers).layers
    theirs = best_groups(side, side, minibatch=minibatch, nodes=workers)
    assert theirs / 2 <= layer.groups <= theirs * 2
    assert layer.hybrid_bytes is not None
    assert layer.data_bytes is not None
    assert layer.hybrid_bytes < layer.data_bytes


def test_large_batches_and_small_layers_stay_data_parallel() -> None:
    model = nn.Sequential(nn.Linear(512, 4096), nn.ReLU(), nn.Linear(4096, 64), nn.Linear(64, 8))
    few, many = planned(model, 2), planned(model, 4096)
    assert [layer.groups < 16 for layer in few.layers] == [True, True, False]
    assert [layer.groups for layer in many.layers] == [16, 16, 16]
    assert not many.styles


def test_gradients_that_hide_behind_computing_are_not_traded_for_activations() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024))
    assert planned(model, 8, compute_s=10.0).layers[0].groups == 16
    assert planned(model, 8, compute_s=0.0).layers[0].groups < 16


def _costs(seconds: float) -> Costs:
    return Costs(gradient_bytes=1.0, activation_bytes=1.0, gradient_s=seconds, activation_s=0.0)


@pytest.mark.parametrize(("mixed_s", "chosen"), [(0.97, [2, 2]), (0.90, [1, 2])])
def test_one_number_of_groups_unless_a_mix_saves_five_percent(mixed_s: float, chosen: list[int]) -> None:
    """The first layer would be a little faster with another number of groups than the second."""
    first = {4: _costs(5.0), 2: _costs(0.5), 1: _costs(mixed_s - 0.5)}
    second = {4: _costs(5.0), 2: _costs(0.5), 1: _costs(3.0)}
    choice = Choice({"a": first, "b": second}, rest_gradient_s=0.0, compute_s=0.0)
    assert list(choice.best().values()) == chosen


def test_a_layer_may_stay_data_parallel_beside_split_ones() -> None:
    first, second = {4: _costs(5.0), 2: _costs(0.5)}, {4: _costs(0.1), 2: _costs(3.0)}
    assert Choice({"a": first, "b": second}, 0.0, 0.0).best() == {"a": 2, "b": 4}
    assert Choice({}, 0.0, 0.0).best() == {}


def test_the_plan_prints() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 4096), nn.Linear(4096, 10))
    plan = tw.parallel.hybridize(
        model,
        groups="auto",
        layers="auto",
        example=torch.zeros(2, 1, 8, 8),
        network=THIN,
        workers=8,
        dry_run=True,
    )
    lines = str(plan).splitlines()
    assert lines[0] == "hybrid plan for 8 workers; bytes sent per worker and step"
    assert " ".join(lines[1].split()) == HEAD
    assert [line.split()[:2] for line in lines[2:4]] == [["2", "colwise"], ["3", "rowwise"]]
    assert lines[4].startswith("everything else  data-parallel")
    assert model.training


def test_workers_are_for_dry_runs() -> None:
    with pytest.raises(tw.errors.SettingError, match="workers must be given in a dry run only, got 8"):
        tw.parallel.hybridize(nn.Sequential(nn.Linear(4, 4)), groups=2, layers=["0"], workers=8)
