"""The training loop in a world of one; several workers are tried through the command line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.data.make import write_all, write_text
from thinwire.errors import DataError, NumericError, SettingError
from thinwire.event_log import read_events
from thinwire.events import Evaluated, Failed, Progress, Record, RunEnded, RunStarted, Summary
from thinwire.recipes import networks, registry
from thinwire.recipes.base import Carried, Data, Recipe, Samples, Training, TrainingPlan
from thinwire.recipes.config import RunConfig, read_config, resolve, write_config
from thinwire.recipes.setup import choose_device
from thinwire.recipes.train import TRACED_STEPS, WorkerContext, train
from thinwire.recipes.trainings import one_cycle
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
    usual: dict[str, object] = {"strategy": "all-reduce", "workers": 1, "epochs": 1}
    return resolve(recipe, **{**usual, **choices})  # type: ignore[arg-type]


def run(recipe: Recipe, chosen: RunConfig) -> list[Record]:
    records: list[Record] = []
    train(recipe, chosen, WorkerContext(0, 1), records.append)
    return records


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 9, 50])
def test_the_rate_goes_up_and_down_in_any_number_of_steps(num_steps: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    plan = TrainingPlan(world_size=1, batch_size=1, num_steps=num_steps)
    schedule, rates = one_cycle(optimizer, plan), []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.5 / 25)
    assert max(rates) == pytest.approx(0.5, rel=0.01) or num_steps < 2
    assert rates[-1] < 0.5 or num_steps < 3


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


def test_evaluations_between_epochs_change_nothing_but_the_number_of_them() -> None:
    often = run(registry.get("digits-cnn"), replace(config(epochs=2, batch_size=64), evaluate_every=10))
    seldom = run(registry.get("digits-cnn"), config(epochs=2, batch_size=64))
    evaluated = [r for r in often if isinstance(r, Evaluated)]
    assert [(r.step, r.epoch) for r in evaluated] == [(10, 1), (20, 1), (23, 1), (30, 2), (40, 2), (46, 2)]
    assert [r.loss for r in evaluated[2::3]] == [r.loss for r in seldom if isinstance(r, Evaluated)]


def test_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    def losses(seed: int) -> list[float | None]:
        records = run(registry.get("digits-cnn"), config(seed=seed, batch_size=64))
        return [r.loss for r in records if isinstance(r, Evaluated)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


@pytest.mark.parametrize("name", registry.names())
def test_every_recipe_trains_from_a_folder(name: str, tmp_path: Path) -> None:
    write_all(tmp_path)
    data = None if name.startswith("digits") else tmp_path  # the digits are in the package
    chosen = config(name, data=data, strategy="silent", device="cpu", batch_size=10)
    recipe = registry.get(name)
    records = run(with_few_samples(recipe), chosen)
    summary = records[-1]
    assert isinstance(summary, Summary)
    assert summary.metric == recipe.target.metric
    assert summary.value is not None
    assert math.isfinite(summary.value)  # two steps may leave all of a few samples wrong
    assert summary.loss is not None
    assert summary.loss > 0


def with_few_samples(recipe: Recipe) -> Recipe:
    """The recipe on its first 20 training samples, so that large networks need not be waited for."""

    def training() -> Training:
        usual = recipe.training()

        def data(folder: Path | None) -> Data:
            whole = usual.data(folder)
            return replace(whole, train=First(whole.train), test=First(whole.test))

        return replace(usual, data=data)

    return replace(recipe, training=training)


@dataclass(frozen=True)
class First:
    samples: Samples

    def __len__(self) -> int:
        return min(20, len(self.samples))

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return self.samples.take(indices)


def test_state_is_carried_through_an_epoch_and_gradients_are_clipped(tmp_path: Path) -> None:
    write_text(tmp_path)
    recipe = registry.get("ptb-lstm")
    seen: list[bool] = []
    norms: list[float] = []

    def training() -> Training:
        usual = recipe.training()

        def forward(model: nn.Module, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
            if model.training:
                seen.append(carried is not None)
            return usual.forward(model, inputs, carried)

        def optimizer(model: nn.Module, plan: TrainingPlan) -> Optimizer:
            made = usual.optimizer(model, plan)
            made.register_step_pre_hook(
                lambda *_: norms.append(
                    float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
                )
            )
            return made

        small = lambda: networks.WordLstm(num_hidden=8, dropout=0.1, scale=0.5)  # noqa: E731
        return replace(usual, forward=forward, optimizer=optimizer, model=small, clip_norm=1e-3)

    run(replace(recipe, training=training), config("ptb-lstm", data=tmp_path, epochs=2))
    assert seen == [False, True, False, True]  # 47 pieces in 20 rows
    assert norms == pytest.approx([1e-3] * 4, rel=1e-3)


def test_a_few_steps_are_traced_with_their_threads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    chosen = config(batch_size=64)
    train(registry.get("digits-cnn"), chosen, WorkerContext(0, 1), lambda record: None, trace=path)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert sum(name.startswith("ProfilerStep") for name in names) == TRACED_STEPS
    num_buckets, rest = divmod(names.count("thinwire::reduce"), TRACED_STEPS)
    assert num_buckets >= 1
    assert rest == 0
    assert any(name.startswith("Optimizer.step") for name in names)
    assert "MainThread" in {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_no_gpu_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 0) == torch.device("cpu")
    with pytest.raises(SettingError, match="torch finds no GPU"):
        choose_device("cuda", 0)


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
    chosen = config(strategy="all-reduce:overlap=none")
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
        ({"workers": 0}, "workers must be 1 to 100,000, got 0"),
        ({"epochs": 0}, "epochs must be 1 to 1,000,000, got 0"),
        ({"batch_size": -1}, "batch size must be 1 to 1,000,000, got -1"),
        ({"seed": -1}, "seed must be from 0"),
        ({"strategy": "none"}, "strategy must be one of"),
        ({"strategy": "all-reduce:overlap=x"}, "overlap must be"),
        ({"device": "gpu"}, "device must be one of 'auto', 'cpu', 'cuda', got 'gpu'"),
    ],
)
def test_wrong_choices_are_refused_before_anything_starts(choices: dict[str, object], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        config("digits-cnn", **choices)
