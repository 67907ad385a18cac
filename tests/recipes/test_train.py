"""The training loop in a world of one; several workers are tried through the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.data.test_mnist import write_mnist
from thinwire.errors import DataError, NumericError, SettingError
from thinwire.events import Evaluated, Failed, Progress, Record, RunEnded, RunStarted, Summary, read_events
from thinwire.recipes import registry
from thinwire.recipes.base import Recipe, Training
from thinwire.recipes.config import Choices, RunConfig, read_config, resolve, write_config
from thinwire.recipes.train import Worker, train
from thinwire.recipes.worker import work


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small layers on two threads are many times slower when something else is running."""
    before, random_state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_rng_state(random_state)


def config(recipe: str = "digits-cnn", **choices: object) -> RunConfig:
    usual: dict[str, object] = {"strategy": "all-reduce", "settings": {}, "workers": 1, "epochs": 1}
    chosen = Choices(**{**usual, **choices})  # type: ignore[arg-type]
    return resolve(recipe, registry.get(recipe), chosen)


def run(recipe: Recipe, chosen: RunConfig) -> list[Record]:
    records: list[Record] = []
    train(recipe, chosen, Worker(0, 1), records.append)
    return records


def test_one_worker_trains_and_tells() -> None:
    records = run(registry.get("digits-cnn"), config(epochs=3))
    evaluated = [r for r in records if isinstance(r, Evaluated)]
    assert [r.epoch for r in evaluated] == [1, 2, 3]
    last = [r for r in records if isinstance(r, Progress)][-1]
    assert last.step == last.num_steps == 3 * 90
    ended, summary = records[-2:]
    assert isinstance(ended, RunEnded)
    assert ended.samples == 3 * 1437
    assert ended.sent_bytes == 0
    assert isinstance(summary, Summary)
    assert summary.value == evaluated[-1].value
    assert summary.value is not None
    assert summary.value > 0.9
    assert summary.steps == 270


def test_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    def losses(seed: int) -> list[float | None]:
        records = run(registry.get("digits-cnn"), config(seed=seed, batch_size=64))
        return [r.loss for r in records if isinstance(r, Evaluated)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_mnist_trains_from_a_folder(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    records = run(registry.get("mnist-cnn"), config("mnist-cnn", data=tmp_path, strategy="silent"))
    assert isinstance(records[-1], Summary)


def with_loss_times(factor: float) -> Recipe:
    recipe = registry.get("digits-cnn")

    def training() -> Training:
        usual = recipe.training()

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return usual.loss(outputs, targets) * factor

        return replace(usual, loss=loss)

    return replace(recipe, training=training)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_training(factor: float) -> None:
    with pytest.raises(NumericError, match=r"worker 0 on .*: the loss is .* at step 1 ") as caught:
        run(with_loss_times(factor), config())
    assert caught.value.hint


def test_worker_writes_its_events_and_shows_them(tmp_path: Path) -> None:
    seen: list[str] = []
    work(tmp_path, config(batch_size=256), {}, lambda event: seen.append(event.record.kind))
    records = [event.record for event in read_events(tmp_path)]
    assert [record.kind for record in records] == seen
    started = records[0]
    assert isinstance(started, RunStarted)
    assert started.pid == os.getpid()
    assert started.config["batch_size"] == 256


def test_worker_reports_a_failure_once_and_raises(tmp_path: Path) -> None:
    chosen = replace(config(), recipe="mnist-cnn", data=str(tmp_path / "nowhere"))
    with pytest.raises(DataError):
        work(tmp_path, chosen, {})
    failures = [event.record for event in read_events(tmp_path) if isinstance(event.record, Failed)]
    assert len(failures) == 1
    assert failures[0].error == "DataError"
    assert "nowhere does not exist" in failures[0].message
    assert failures[0].hint
    assert failures[0].expected
    assert not failures[0].consequence


def test_config_is_kept_with_versions(tmp_path: Path) -> None:
    chosen = config(settings={"overlap": "none"}, data=tmp_path)
    write_config(tmp_path, chosen)
    assert read_config(tmp_path) == chosen
    assert chosen.settings == {"overlap": "none"}
    assert (chosen.epochs, chosen.batch_size) == (1, 16)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": -1}, "batch size must be at least 1, got -1"),
        ({"seed": -1}, "seed must be from 0"),
        ({"strategy": "none"}, "strategy must be one of"),
        ({"settings": {"overlap": "x"}}, "overlap must be"),
    ],
)
def test_wrong_choices_are_refused_before_anything_starts(choices: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        config("digits-cnn", **choices)
