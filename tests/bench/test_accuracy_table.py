"""Time to accuracy, read from ordinary run folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from thinwire.bench.config import QUICK, BenchConfig, run_folder
from thinwire.bench.tables import NOT_RUN, accuracy_rows, accuracy_table, target_of
from thinwire.event_log import EventWriter
from thinwire.events import Evaluated, Failed, Summary
from thinwire.recipes.base import MetricTarget

SYSTEMS = ("silent", "all-reduce", "ddp", "late", "absent", "broken")
STUDY = QUICK.studies[0]
CONFIG: BenchConfig = replace(QUICK, systems=SYSTEMS)
ACCURACY = MetricTarget(metric="accuracy", value=0.97)


def write_run(bench: Path, system: str, values: list[float], *, messages: int = 0, caution: str = "") -> None:
    """A run evaluated once a second."""
    with EventWriter(run_folder(bench, STUDY, system), 0) as writer:
        for second, value in enumerate(values, 1):
            writer.write(
                Evaluated(step=6 * second, epoch=1, metric="accuracy", value=value, loss=0.1, train_s=second)
            )
        writer.write(
            Summary(
                recipe="digits-cnn",
                strategy=system,
                settings={},
                workers=4,
                epochs=6,
                steps=132,
                metric="accuracy",
                value=values[-1],
                target=0.97,
                reached=values[-1] >= 0.97,
                loss=0.1,
                train_s=float(len(values)),
                samples_per_s=100.0,
                sent_bytes=400,
                sent_bytes_per_step=240e3,
                messages=messages,
                exposed_share=0.5,
                advice=caution,
            )
        )


def test_each_system_has_a_row_whatever_became_of_it(tmp_path: Path) -> None:
    write_run(tmp_path, "silent", [0.5, 0.6])
    write_run(tmp_path, "all-reduce", [0.9, 0.98, 0.97], messages=12)
    write_run(tmp_path, "ddp", [0.8, 0.9, 0.975, 0.98])
    with EventWriter(run_folder(tmp_path, STUDY, "broken"), 0) as writer:
        writer.write(Failed(host="h", error="E", message="it broke"))
    rows = accuracy_rows(tmp_path, CONFIG, STUDY, {"absent": "not installed: x"}, counted=True)
    silent, ours, ddp, late, absent, broken = rows
    assert (ours.seconds_to_target, ours.steps_to_target, ours.speed_up) == (2.0, 12, 1.5)
    assert (ddp.seconds_to_target, ddp.speed_up, ddp.exposed_share) == (3.0, 1.0, None)
    assert silent.seconds_to_target is None
    assert (late.unavailable, absent.unavailable) == (NOT_RUN, "not installed: x")
    assert broken.unavailable == "failed: it broke"
    table = accuracy_table(STUDY, rows)
    texts = [row[:2] for row in table.rows]
    assert texts[0] == ("silent", "not reached")
    assert texts[1] == ("all-reduce", "2.0")
    assert texts[4] == ("absent", "not installed")
    assert "absent: not installed: x" in table.notes


def test_what_a_strategy_says_of_so_few_steps_is_told(tmp_path: Path) -> None:
    write_run(tmp_path, "late", [0.8], messages=12, caution="it has too few steps")
    table = accuracy_table(STUDY, accuracy_rows(tmp_path, CONFIG, STUDY, {}, counted=True))
    assert "late: it has too few steps" in table.notes


def test_bytes_nobody_counted_are_not_shown(tmp_path: Path) -> None:
    write_run(tmp_path, "ddp", [0.98])
    write_run(tmp_path, "all-reduce", [0.98], messages=12)
    _, ours, ddp, *_ = accuracy_rows(tmp_path, CONFIG, STUDY, {}, counted=False)
    assert ddp.sent_bytes_per_step is None
    assert ours.sent_bytes_per_step == 240e3


def test_the_target_is_one_that_exact_sgd_reaches() -> None:
    assert target_of(ACCURACY, 0.975).value == 0.97
    assert target_of(ACCURACY, 0.32).value == pytest.approx(0.3184)
    perplexity = MetricTarget(metric="perplexity", value=100.0, higher_is_better=False)
    assert target_of(perplexity, 90.0).value == 100.0
    assert target_of(perplexity, 200.0).reached_by(200.0)


def test_missing_data_is_a_row_that_says_what_to_give() -> None:
    table = accuracy_table(STUDY, [], no_data="no MNIST files in x: name it with --data DIR")
    assert table.rows[0][:2] == ("(all)", "no data")
    assert table.notes == ("no MNIST files in x: name it with --data DIR",)
