"""What the demo says of its trainings; the demo itself is run by `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.bench.config import DEMO
from thinwire.cli.demo import OTHERS, _accuracy, _lengths, _summary
from thinwire.event_log import EventWriter
from thinwire.events import Progress, Summary
from thinwire.planner.accuracy import EXACT, Expected, expected
from thinwire.strategies import registry


def progress(step: int, train_s: float) -> Progress:
    return Progress(
        step=step,
        num_steps=100,
        epoch=1,
        num_epochs=1,
        loss=1.0,
        samples_per_s=1.0,
        sent_bytes=0,
        exposed_s=0.0,
        train_s=train_s,
    )


def write(run: Path, *steps: tuple[int, float]) -> Path:
    names = {"recipe": "digits-wide", "strategy": "silent", "metric": "accuracy"}
    counts = {"workers": 4, "epochs": 1, "steps": steps[-1][0], "sent_bytes": 0, "messages": 0}
    shares = {"samples_per_s": 1.0, "sent_bytes_per_step": 0.0, "exposed_share": 0.0, "loss": 0.1}
    measured = {"value": 0.975, "target": 0.97, "reached": True, "train_s": steps[-1][1]}
    with EventWriter(run, 0) as writer:
        for step, train_s in steps:
            writer.write(progress(step, train_s))
        writer.write(Summary(settings={}, **names, **counts, **shares, **measured))  # type: ignore[arg-type]
    with EventWriter(run, 1) as writer:
        writer.write(progress(50, 99.0))
    return run


def test_the_first_steps_are_not_timed(tmp_path: Path) -> None:
    found = _summary(write(tmp_path, (1, 5.0), (10, 6.0), (60, 7.0), (100, 9.6)))
    assert found == {"step_s": pytest.approx(0.04), "value": 0.975, "metric": "accuracy"}


def test_what_was_not_trained_has_no_summary(tmp_path: Path) -> None:
    assert _summary(tmp_path / "nowhere") is None
    assert _summary(write(tmp_path, (1, 5.0), (10, 6.0))) is None


def test_the_plan_is_for_the_steps_that_are_trained() -> None:
    [study] = DEMO.studies
    num_steps, num_tested = _lengths(study)
    samples_per_step = study.workers * 16
    assert num_steps == study.epochs * -(-1437 // samples_per_step)
    assert num_tested == 360


def test_the_demos_recommendation_is_judged_by_the_demos_own_training() -> None:
    """What its strategies lose was measured with its recipe, workers and steps, and not with a longer one."""
    [study] = DEMO.studies
    num_steps, _ = _lengths(study)
    for text in ("gossip-grad", *OTHERS):
        name, given = registry.parse(text)
        settings = registry.resolved(registry.build(name, given))
        loss = expected(name, settings, study.workers, recipe=study.recipe, num_steps=num_steps)
        assert loss is not None
        assert f"{study.recipe} with {study.workers} workers, {study.epochs} epochs" in loss.basis


def test_a_loss_is_said_with_what_one_training_may_lose() -> None:
    own, base = ({"metric": "accuracy", "value": value} for value in (0.964, 0.975))
    loss = Expected(loss=0.5, low=0.1, high=0.9, basis="others")
    words = _accuracy(own, base, loss, 360)
    assert "96.4 %, that of DDP 97.5 %: 1.1 points less. Other trainings have lost 0.5" in words
    assert "360 test samples -1.9 to +2.9 were to be expected" in words
    assert "1.1 points more" in _accuracy(base, own, EXACT, 360)
    narrow = _accuracy(own, base, loss, 1_000_000)
    assert "+0.1 to +0.9" in narrow
    assert _accuracy(own, base, None, 360).endswith("points less.")
