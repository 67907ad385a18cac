"""All workers shrink in the same step, whatever the strategy; an event is undone where the loss rises."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.apoptosis.training import WIDTH, history, parts, step_once, train
from tests.worlds import run_threads
from thinwire.apoptosis import agreement
from thinwire.apoptosis.architecture import export, rebuild
from thinwire.apoptosis.calls import Call
from thinwire.apoptosis.shrinking import Shrinking
from thinwire.errors import SettingError, UsageError
from thinwire.wire.local import LocalLane

STRATEGIES = [
    tw.AllReduce(),
    tw.AllReduce(overlap="none"),
    tw.AllReduce(overlap="forward"),
    tw.GTopK(density=0.05),
    tw.TopK(density=0.05),
    tw.StochasticGradientPush(),
    tw.GossipGraD(),
    tw.GossipGraD(payload="int8"),
    tw.SASGD(interval=3),
    tw.DiLoCo(interval=5),
    tw.EASGD(interval=3),
]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_all_workers_shrink_alike(strategy: tw.Strategy, workers: int) -> None:
    outcomes = run_threads(workers, lambda lane: train(strategy, lane, norm=workers == 2))
    first = outcomes[0]
    assert len(first.events) >= 2
    assert first.shapes["0.weight"][0] < WIDTH
    for other in outcomes[1:]:
        assert other.shapes == first.shapes
        assert [(e.step, e.widths) for e in other.events] == [(e.step, e.widths) for e in first.events]
        if strategy.replicas_agree:
            assert all(map(torch.equal, other.weights, first.weights))
    assert all(weight.isfinite().all() for weight in first.weights)
    assert sum(first.losses[-4:]) < sum(first.losses[:4]), "it still learns"


def test_bytes_fall_in_proportion_to_parameters() -> None:
    outcome = run_threads(2, lambda lane: train(tw.AllReduce(), lane))[0]
    before = sum(p.numel() for p in parts()[0].parameters())
    for event in outcome.events[:-1]:
        share = event.num_parameters / before
        sent = outcome.sent[event.step] / outcome.sent[0]  # the step after the event
        assert sent == pytest.approx(share, rel=0.05, abs=0.01)


def test_after_an_event_training_is_that_of_a_small_network() -> None:
    """From the event on, a link over the small network, with the same momentum, makes the same steps."""
    settings = tw.Apoptosis(mode="aggressive", every=6, start=6, budget=0.1)

    def worker(lane: LocalLane) -> None:
        model, optimizer = parts()
        with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane, apoptosis=settings) as link:
            for step in range(6):
                step_once(link, model, optimizer, step)
            small, momentum = export(model).train(), optimizer.state_dict()
            saved = {k: v.clone() for k, v in momentum["state"][0].items()}
            other = torch.optim.SGD(small.parameters(), lr=0.05, momentum=0.9)
            other.load_state_dict(
                {
                    **momentum,
                    "state": {k: {n: t.clone() for n, t in s.items()} for k, s in momentum["state"].items()},
                }
            )
            for step in range(6, 11):
                step_once(link, model, optimizer, step)
            assert saved.keys() == {"momentum_buffer"}
        with tw.attach(small, other, tw.AllReduce(), process_group=lane.lane("small")) as plain:
            for step in range(6, 11):
                step_once(plain, small, other, step)
        for ours, theirs in zip(model.parameters(), small.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-14)

    run_threads(2, worker)


def test_a_loss_that_rises_undoes_the_event() -> None:
    settings = tw.Apoptosis(mode="adaptive", every=8, start=8, budget=0.3)
    model, optimizer = parts()
    with tw.attach(model, optimizer, tw.AllReduce(), apoptosis=settings) as link:
        for step in range(8):
            step_once(link, model, optimizer, step)
        assert history(link)[-1].removed > 0
        first = model[0]
        assert isinstance(first, torch.nn.Linear)
        narrow = first.out_features
        before = link.companion._undo[0].tensors  # type: ignore[union-attr]
        before = {name: tensor.clone() for name, tensor in before.items()}
        for step in range(8, 16):
            link.observe(1e3)  # whatever the model does
            step_once(link, model, optimizer, step)
        assert history(link)[-1].brought_back > 0
        removed, undone = history(link)[-2:]
        assert undone.widths == removed.before
        assert undone.before == removed.widths
        assert first.out_features == WIDTH > narrow
        assert all(torch.equal(t, before[name]) for name, t in model.named_parameters())
        assert link.stats.steps == 16
        for step in range(16, 20):
            step_once(link, model, optimizer, step)
        assert link.companion._pace.strength == 0.5  # type: ignore[union-attr]


def test_a_loss_that_rises_with_nothing_to_undo_removes_nothing() -> None:
    """As after a checkpoint was loaded: the copy of the model before the last event is gone."""
    model, optimizer = parts()
    settings = tw.Apoptosis(mode="adaptive", every=8, start=8, budget=0.3)
    with tw.attach(model, optimizer, tw.AllReduce(), apoptosis=settings) as link:
        for step in range(8):
            step_once(link, model, optimizer, step)
        assert isinstance(link.companion, Shrinking)
        link.companion.load_state_dict(link.companion.state_dict())
        shapes = [p.shape for p in model.parameters()]
        for step in range(8, 16):
            link.observe(1e3)
            step_once(link, model, optimizer, step)
        assert [p.shape for p in model.parameters()] == shapes
        assert len(history(link)) == 1


def test_adaptive_says_that_it_needs_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = parts()
    with (
        caplog.at_level(logging.WARNING),
        tw.attach(model, optimizer, tw.AllReduce(), apoptosis=tw.Apoptosis(every=2, start=2)) as link,
    ):
        for _ in range(6):
            model(torch.randn(8, 8, dtype=torch.float64)).sum().backward()
            optimizer.step()
        assert not history(link)
    assert sum("link.observe(loss)" in record.message for record in caplog.records) == 1


def test_a_layer_is_never_cut_to_nothing() -> None:
    model, optimizer = parts()
    with torch.no_grad():
        model.get_parameter("2.weight").zero_()
        model.get_parameter("2.bias").zero_()
    settings = tw.Apoptosis(mode="aggressive", every=5, start=5, budget=0.99, min_width=3)
    with tw.attach(model, optimizer, tw.AllReduce(), apoptosis=settings) as link:
        for step in range(6):
            step_once(link, model, optimizer, step)
        widths = history(link)[-1].widths
    assert widths["0"] >= 3
    assert widths["2"] >= 3


def test_a_worker_that_cannot_leaves_all_as_they_were() -> None:
    def worker(lane: LocalLane) -> tuple[str, int]:
        model, optimizer = parts()
        settings = tw.Apoptosis(mode="aggressive", every=4, start=4, budget=0.2)
        try:
            with tw.attach(model, optimizer, tw.AllReduce(), process_group=lane, apoptosis=settings) as link:
                for step in range(4):
                    if step == 3 and lane.rank == 1:
                        optimizer.state[model.get_parameter("0.weight")]["history"] = torch.zeros(5, 7)
                    step_once(link, model, optimizer, step)
        except UsageError as error:
            return str(error), len(model.get_parameter("0.weight"))
        return "", 0

    for text, width in run_threads(2, worker):
        assert "worker 1 cannot remove neurons: SGD keeps history of 0.weight" in text
        assert width == WIDTH


def test_a_module_that_is_never_called_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = parts()
    both = nn.ModuleList([model])
    settings = tw.Apoptosis(mode="aggressive", every=2, start=2)
    with caplog.at_level(logging.WARNING), tw.attach(both, optimizer, tw.AllReduce(), apoptosis=settings):
        for _ in range(2):
            model(torch.randn(8, 8, dtype=torch.float64)).sum().backward()
            optimizer.step()
    assert any(
        "attach the module that the training loop calls" in record.message for record in caplog.records
    )


@pytest.mark.parametrize("every", [20, 100])
def test_an_event_looks_at_the_last_calls_before_it(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    seen = list[list[float]]()

    def look(model: nn.Module, groups: object, calls: Sequence[Call]) -> dict[Any, Any]:
        seen.append([float(first) for call in calls for first in call.args[0][::64, 0]])
        return {}

    monkeypatch.setattr(agreement, "measure", look)
    model, optimizer = parts()
    settings = tw.Apoptosis(mode="aggressive", every=every, start=every)
    with tw.attach(model, optimizer, tw.AllReduce(), apoptosis=settings):
        for step in range(1, 3 * every + 1):
            # the size of a batch may change: it is noticed some steps before an event
            x = torch.full((256 if step < every - 30 else 64, 8), float(step), dtype=torch.float64)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert seen[0] == list(range(every + 1 - len(seen[0]), every + 1))
    assert seen[1] == list(range(2 * every + 1 - len(seen[1]), 2 * every + 1))
    assert [len(steps) * 64 for steps in seen] == [512, 512], "two samples for each of 256 neurons"


def test_adaptive_with_too_few_losses_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = parts()
    settings = tw.Apoptosis(mode="adaptive", every=1, start=1)
    with (
        caplog.at_level(logging.WARNING),
        tw.attach(model, optimizer, tw.AllReduce(), apoptosis=settings) as link,
    ):
        for step in range(3):
            step_once(link, model, optimizer, step)
    assert [record.message for record in caplog.records if "needs two of them" in record.message]


def test_a_group_lasso_empties_neurons() -> None:
    settings = tw.Apoptosis(mode="conservative", every=50, start=50, lasso=0.3)
    model, optimizer = parts()
    with tw.attach(model, optimizer, tw.AllReduce(), apoptosis=settings) as link:
        for step in range(100):
            step_once(link, model, optimizer, step)
        assert sum(event.removed for event in history(link)) > WIDTH // 4


def test_a_checkpoint_carries_the_architecture(tmp_path: Path) -> None:
    settings = tw.Apoptosis(mode="aggressive", every=6, start=6, budget=0.15)

    def run(lane: LocalLane, start: int, stop: int) -> tuple[list[Any], list[torch.Tensor]]:
        model, optimizer = parts()
        rebuild(model, tmp_path)
        with (
            tw.attach(
                model, optimizer, tw.GTopK(density=0.1), process_group=lane, apoptosis=settings
            ) as link,
            tw.Checkpoint(tmp_path, link=link, model=model, optimizer=optimizer) as checkpoint,
        ):
            saved = checkpoint.load()
            assert (saved.step if saved else 0) == start
            for step in range(start, stop):
                step_once(link, model, optimizer, step)
            checkpoint.save(stop)
            return [tuple(p.shape) for p in model.parameters()], [
                p.detach().clone() for p in model.parameters()
            ]

    first = run_threads(2, lambda lane: run(lane, 0, 10))
    second = run_threads(2, lambda lane: run(lane, 10, 14))
    assert second[0][0] == second[1][0]
    assert second[0][0][0][0] < first[0][0][0][0] < WIDTH


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": "fast"}, "mode"),
        ({"every": 0}, "every"),
        ({"min_width": 0}, "min_width"),
        ({"budget": 1.5}, "budget"),
        ({"lasso": -1.0}, "lasso"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        tw.Apoptosis(**settings)
