"""Events as TensorBoard scalars."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import main
from thinwire.errors import MissingExtra
from thinwire.events import Evaluated, Event, Progress
from thinwire.recipes.follow import curves, tensorboard_writer

PROGRESS = Progress(
    step=7,
    num_steps=10,
    epoch=1,
    num_epochs=2,
    loss=0.5,
    samples_per_s=100.0,
    sent_bytes=4000,
    exposed_s=1.0,
    train_s=4.0,
)
EVALUATED = Evaluated(step=10, epoch=1, metric="perplexity", value=80.0, loss=None, train_s=5.0)


def test_each_worker_has_its_curves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with curves(tmp_path) as draw:
        draw(Event(1000.0, 0, PROGRESS))
        draw(Event(1001.0, 1, PROGRESS))
        draw(Event(1002.0, 0, EVALUATED))

    def read(rank: int) -> dict[str, list[tuple[float, int, float]]]:
        loaded: Any = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / f"worker-{rank}"))
        loaded.Reload()
        found = {}
        for tag in loaded.Tags()["tensors"]:
            values = [(e.wall_time, e.step, e.tensor_proto.float_val[0]) for e in loaded.Tensors(tag)]
            found[tag] = values
        return found

    zero = read(0)
    assert zero["train/loss"] == [(1000.0, 7, 0.5)]
    assert zero["wire/exposed_share"] == [(1000.0, 7, 0.25)]
    assert zero["test/perplexity"] == [(1002.0, 10, 80.0)]
    assert "test/loss" not in zero  # None is no point of a curve
    assert read(1)["train/loss"] == [(1001.0, 7, 0.5)]


def test_missing_package_is_answered_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(MissingExtra):
        tensorboard_writer()
    assert main(["train", "--tensorboard"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: TensorBoard scalars need a package that is not installed")
    assert lines[1] == "hint: pip install 'thinwire[tensorboard]'"
