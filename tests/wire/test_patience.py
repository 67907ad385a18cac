"""The one time-out knob, and the line that says what follows from it."""

from __future__ import annotations

import pytest

import thinwire as tw
from tests.contract.training import model_and_optimizer
from thinwire.wire.patience import Patience


def test_everything_follows_from_silence() -> None:
    patience = Patience(20.0)
    assert (patience.ask_s, patience.unanswered_s, patience.alone_s) == (10, 16, 60)
    assert patience.describe(1800, elastic=True) == (
        "time-outs from silence_s=20: heartbeats every 0.5 s, a worker whose connections break is lost at "
        "once, one whose host does not answer after 16 s, a silent one after 20 s, asked for through the "
        "others after 10 s, a side without a majority stops after 60 s, one that is alive and late is waited "
        "for 1800 s (timeout_s)"
    )
    assert "majority" not in patience.describe(1800, elastic=False)


def test_an_elastic_run_says_it_at_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model, optimizer = model_and_optimizer()
    with tw.attach(model, optimizer, tw.AllReduce(), elastic=True, silence_s=4, timeout_s=60):
        pass
    [line] = [record.getMessage() for record in caplog.records if "time-outs" in record.getMessage()]
    assert line == Patience(4.0).describe(60, elastic=True)
