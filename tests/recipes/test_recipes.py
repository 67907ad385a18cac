"""The recipes themselves, their registry and their parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.test_mnist import write_mnist
from thinwire.errors import SettingError
from thinwire.recipes import images, registry
from thinwire.recipes.base import Plan, Target


@pytest.mark.parametrize("name", registry.names())
def test_every_recipe_has_what_a_listing_needs(name: str) -> None:
    recipe = registry.get(name)
    assert recipe.name == name
    assert recipe.summary
    assert recipe.epochs >= 1
    assert recipe.batch_size >= 1
    assert 0 < recipe.target.value <= 1


def test_unknown_recipe_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="one of digits-cnn, mnist-cnn, got 'digit_cnn'") as caught:
        registry.get("digit_cnn")
    assert caught.value.hint == "did you mean 'digits-cnn'?"
    with pytest.raises(SettingError) as caught:
        registry.get("zzz")
    assert "thinwire recipes" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not_there:recipe", "no module 'not_there'"),
        ("thinwire.recipes.digits_cnn:other", "has no 'other'"),
        ("thinwire.recipes.registry:names", "must return a Recipe, got tuple"),
    ],
)
def test_wrong_place_of_an_own_recipe_is_explained(name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        registry.get(name)


def test_own_recipe_is_found_by_module_and_function() -> None:
    assert registry.get("thinwire.recipes.digits_cnn:digits_cnn") == registry.get("digits-cnn")


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; from thinwire.recipes import registry as r; "
        "[r.get(n) for n in r.names()]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_target_knows_which_way_is_better() -> None:
    assert Target(metric="accuracy", value=0.9).reached_by(0.9)
    assert not Target(metric="accuracy", value=0.9).reached_by(0.89)
    assert Target(metric="perplexity", value=80, higher_is_better=False).reached_by(79)
    assert not Target(metric="accuracy", value=0.9).reached_by(float("nan"))


@pytest.mark.parametrize("name", registry.names())
def test_parts_fit_together(name: str, tmp_path: Path) -> None:
    write_mnist(tmp_path)
    training = registry.get(name).training()
    data = training.data(tmp_path)
    inputs, targets = data.train.take(np.arange(6))
    assert float(inputs.min()) >= 0
    assert 0.5 < float(inputs.max()) <= 1
    outputs = training.model()(inputs)
    assert outputs.shape == (6, 10)
    assert training.loss(outputs, targets).isfinite()
    assert 0 <= int(training.score(outputs, targets)) <= 6


def test_learning_rate_grows_with_the_square_root_of_the_global_batch() -> None:
    model = torch.nn.Linear(2, 2)
    rates = [
        images.adamw(
            model, Plan(world_size=world_size, batch_size=16, num_steps=10), rate_at_64=0.01
        ).param_groups[0]["lr"]
        for world_size in (1, 4, 16)
    ]
    assert rates == pytest.approx([0.005, 0.01, 0.02])


def test_schedule_lasts_for_all_steps_and_ends_near_nothing() -> None:
    plan = Plan(world_size=1, batch_size=64, num_steps=10)
    optimizer = images.adamw(torch.nn.Linear(2, 2), plan, rate_at_64=0.01)
    schedule = images.one_cycle(optimizer, plan)
    for _ in range(plan.num_steps):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] < 1e-5
