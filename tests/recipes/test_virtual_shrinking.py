"""Apoptosis on the virtual clock: all replicas go on as smaller ones, and send less."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.apoptosis.pace import RemovalPace
from thinwire.errors import SettingError
from thinwire.event_log import read_events
from thinwire.events import Shrunk
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.config import resolve
from thinwire.recipes.virtual import SimulationResult, VirtualCluster, simulate

RECIPE = registry.get("digits-cnn")


def run(folder: Path, strategy: str, apoptosis: str, *faults: str, workers: int = 2) -> SimulationResult:
    settings = resolve(
        "digits-cnn", strategy, workers=workers, epochs=1, batch_size=32, device="cpu", apoptosis=apoptosis
    )
    description = describe(hosts=workers, rate="10mbit", faults=faults)
    return simulate(RECIPE, settings, VirtualCluster(description=description, compute_s=0.01), folder)


def shrunk(folder: Path) -> list[Shrunk]:
    return [event.record for event in read_events(folder) if isinstance(event.record, Shrunk)]


@pytest.mark.parametrize(
    "strategy", ["all-reduce", "all-reduce:overlap=forward", "gossip-grad", "diloco:interval=4"]
)
def test_replicas_shrink_and_send_less(tmp_path: Path, strategy: str) -> None:
    whole = run(tmp_path / "whole", strategy, "")
    small = run(tmp_path / "small", strategy, "aggressive:every=4:start=4:budget=0.05")
    events = shrunk(tmp_path / "small")
    assert events[0].step == 4
    assert events[-1].num_parameters < 0.8 * sum(p.numel() for p in RECIPE.training().model().parameters())
    # what is sent to decide counts too, and this training has 23 steps
    assert small.summary.sent_bytes_per_step < 0.95 * whole.summary.sent_bytes_per_step
    assert small.summary.train_s < whole.summary.train_s
    assert small.summary.steps == whole.summary.steps
    assert small.distance < 0.5


def test_an_event_is_undone_on_all_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = iter(["remove", "undo", "wait", "wait", "wait", "wait", "wait", "wait", "wait"])
    monkeypatch.setattr(RemovalPace, "decide", lambda self, sums: next(decisions))
    monkeypatch.setattr(RemovalPace, "skip", lambda self: False)
    run(tmp_path, "gossip-grad", "adaptive:every=5:start=5:budget=0.2")
    removed, undone = shrunk(tmp_path)
    assert undone.causes == {"undone": 1}
    assert undone.widths == removed.before


def test_what_is_not_simulated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="faults must be left out with apoptosis"):
        run(tmp_path, "all-reduce", "aggressive", "kill:host=1,step=3")
    with pytest.raises(SettingError, match="lasso must be left out in a simulation"):
        run(tmp_path, "all-reduce", "conservative:lasso=0.1")
