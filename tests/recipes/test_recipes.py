"""The recipes themselves, their registry and their parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.make import write_all
from thinwire.data import load_tokens
from thinwire.errors import DataError, SettingError
from thinwire.recipes import networks, registry, samples, trainings
from thinwire.recipes.base import MetricTarget, TrainingPlan


@pytest.mark.parametrize("name", registry.names())
def test_every_recipe_has_what_a_listing_needs(name: str) -> None:
    recipe = registry.get(name)
    assert recipe.name == name
    assert recipe.summary
    assert recipe.epochs >= 1
    assert recipe.batch_size >= 1
    assert recipe.target.value > 0
    assert recipe.target.higher_is_better == (recipe.target.metric == "accuracy")


def test_unknown_recipe_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"one of digits-cnn, .*, got 'digit_cnn'") as caught:
        registry.get("digit_cnn")
    assert caught.value.hint == "did you mean 'digits-cnn'?"
    with pytest.raises(SettingError) as caught:
        registry.get("zzz")
    assert "thinwire recipes" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not_there:recipe", "no module 'not_there'"),
        ("thinwire.recipes.catalog:other", "has no 'other'"),
        ("thinwire.recipes.registry:names", "a function that returns one, got a tuple"),
    ],
)
def test_wrong_place_of_an_own_recipe_is_explained(name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        registry.get(name)


def test_own_recipe_is_found_by_module_and_function() -> None:
    assert registry.get("thinwire.recipes.catalog:digits_cnn").name == "digits-cnn"


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; from thinwire.recipes import registry as r; "
        "[r.get(n) for n in r.names()]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_target_knows_which_way_is_better() -> None:
    assert MetricTarget(metric="accuracy", value=0.9).reached_by(0.9)
    assert not MetricTarget(metric="accuracy", value=0.9).reached_by(0.89)
    assert MetricTarget(metric="perplexity", value=80, higher_is_better=False).reached_by(79)
    assert not MetricTarget(metric="accuracy", value=0.9).reached_by(float("nan"))


@pytest.mark.parametrize("name", registry.names())
def test_parts_fit_together(name: str, tmp_path: Path) -> None:
    write_all(tmp_path)
    training = registry.get(name).training()
    data = training.data(tmp_path)
    inputs, targets = data.train.take(np.arange(6))
    model = training.model().eval()
    outputs, carried = training.forward(model, inputs, None)
    assert outputs.shape[:-1] == targets.shape
    assert training.loss(outputs, targets).isfinite()
    mean = training.score(outputs, targets).item() / 6
    chance = 1 / outputs.shape[-1]
    # before training, accuracy is anything and perplexity is about the number of words
    assert 0 <= training.metric(mean) <= 1 or 0.3 < training.metric(mean) * chance < 3
    assert (carried is not None) == (data.order == "streams")
    again, _ = training.forward(model, inputs, carried)
    assert torch.equal(again, outputs) == (carried is None)
    assert not any(part.requires_grad for part in carried or ())


def test_learning_rate_grows_with_the_square_root_of_the_global_batch() -> None:
    model = torch.nn.Linear(2, 2)
    rates = [
        trainings.adamw(
            model, TrainingPlan(world_size=world_size, batch_size=16, num_steps=10), rate_at_64=0.01
        ).param_groups[0]["lr"]
        for world_size in (1, 4, 16)
    ]
    assert rates == pytest.approx([0.005, 0.01, 0.02])


def test_schedule_lasts_for_all_steps_and_ends_near_nothing() -> None:
    plan = TrainingPlan(world_size=1, batch_size=64, num_steps=10)
    optimizer = trainings.adamw(torch.nn.Linear(2, 2), plan, rate_at_64=0.01)
    schedule = trainings.one_cycle(optimizer, plan)
    for _ in range(plan.num_steps):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] < 1e-5


@pytest.mark.parametrize("name", ["digits-cnn", "mnist-cnn"])
def test_grey_images_are_scaled(name: str, tmp_path: Path) -> None:
    write_all(tmp_path)
    inputs, _ = registry.get(name).training().data(tmp_path).train.take(np.arange(6))
    assert float(inputs.min()) >= 0
    assert 0.5 < float(inputs.max()) <= 1


def test_networks_have_the_published_sizes() -> None:
    def size(model: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    assert size(networks.resnet20()) == 269_722  # He et al., table 6: 0.27 million
    assert size(networks.vgg16()) == 14_724_042
    assert size(networks.WordLstm(num_hidden=200, dropout=0, scale=0.1)) == 4_653_200
    assert size(networks.WordLstm(num_hidden=650, dropout=0, scale=0.1)) == 19_780_400


def test_text_in_pieces_has_the_next_word_as_target(tmp_path: Path) -> None:
    write_all(tmp_path)
    tokens = load_tokens(tmp_path)
    pieces = samples.text_pieces(tokens, length=35, order="streams").train
    inputs, targets = pieces.take(np.array([0, 3]))
    assert inputs.shape == targets.shape == (2, 35)
    assert inputs[1].tolist() == tokens.train[105:140].tolist()
    assert targets[1].tolist() == tokens.train[106:141].tolist()
    pieces.take(np.array([len(pieces) - 1]))
    with pytest.raises(DataError, match="less than one piece"):
        samples.text_pieces(tokens, length=10_000, order="shuffled")


def test_transformer_looks_at_no_later_word() -> None:
    model = networks.Transformer(length=8, width=16, num_blocks=2, num_heads=2, dropout=0.1).eval()
    words = torch.arange(8).unsqueeze(0)
    changed = words.clone()
    changed[0, 5] = 77
    before, after = model(words), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_perplexity_is_the_number_of_equally_likely_words() -> None:
    outputs, targets = torch.zeros(2, 5, 50), torch.zeros(2, 5, dtype=torch.long)
    mean = float(trainings.summed_loss(outputs, targets)) / 2
    assert trainings.perplexity(mean) == pytest.approx(50, rel=1e-5)
    assert trainings.perplexity(1e6) > 1e300


def test_rate_stays_for_a_third_of_the_run_and_is_then_halved() -> None:
    plan = TrainingPlan(world_size=2, batch_size=40, num_steps=39)
    optimizer = trainings.plain_sgd(torch.nn.Linear(2, 2), plan, rate_at_20=1.0)
    schedule = trainings.flat_then_halved(optimizer, plan)
    rates = []
    for _ in range(39):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:14] == pytest.approx([2.0] * 14)
    assert rates[20] / rates[17] == pytest.approx(0.5)
    assert rates[-1] < 0.01
