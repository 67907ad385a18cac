"""`thinwire simulate`: its table, its folder, and what wrong input is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.event_log import read_events
from thinwire.events import Summary


def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = f"simulate --workers 2,3 --epochs 1 --batch-size 64 --compute 0.1s --device cpu --out {out}"
    assert main([*words.split(), "--strategy", "silent", "--strategy", "all-reduce:overlap=none"]) == 0
    shown, told = capsys.readouterr()
    lines = shown.splitlines()
    assert lines[0].split()[:4] == ["workers", "strategy", "accuracy", "loss"]
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["2", "silent"],
        ["2", "all-reduce:overlap=none"],
        ["3", "silent"],
        ["3", "all-reduce:overlap=none"],
    ]
    assert "epoch 1: 1437 samples" in told
    folders = sorted(path.name for path in out.iterdir() if (path / "events").is_dir())
    assert folders == ["all-reduce-overlap=none-2", "all-reduce-overlap=none-3", "silent-2", "silent-3"]
    kept = json.loads((out / "silent-2" / "config.json").read_text())["config"]
    assert kept["clock"] == "virtual"
    assert kept["cluster"]["latency_s"] == 0.0004
    summaries = [e.record for e in read_events(out / "silent-2") if isinstance(e.record, Summary)]
    assert len(summaries) == 1


def test_sizes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    net = "params=1e6,layers=4,forward=0.1,backward=0.2"
    words = f"simulate --emulate {net} --workers 4..8 --rate 100mbit --latency 1ms --steps 2 --json"
    assert main(words.split()) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["workers"], row["strategy"]) for row in rows] == [
        (4, "silent"),
        (4, "all-reduce"),
        (8, "silent"),
        (8, "all-reduce"),
    ]
    assert rows[0]["step_s"] == pytest.approx(0.3)
    assert rows[1]["step_s"] > 0.3 + 4 / 12.5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--workers four", "workers must be 64, 4,16 or 4..64, got 'four'"),
        ("--workers 0", "workers must be from 1 to 100,000, got '0'"),
        ("--strategy all-reduce:overlap", "strategy must be NAME or NAME:KEY=VALUE:KEY=VALUE, got"),
        ("--strategy not_there:Mine", "strategy 'not_there:Mine' cannot be imported: no module 'not_there'"),
        ("--strategy gosip", "strategy must be one of"),
        ("--latency 3", "latency must be a time, got '3'\nhint: a number with us, ms, s, min or h"),
        ("--compute fast", "compute must be a time, got 'fast'"),
        ("--slow 9=0.5", "slow must be a host from 0 to 3, got '9=0.5'"),
        ("--fault kill:host=9,step=1", "fault host must be 0 to 3, got 9"),
        ("--jitter -1 --epochs 1", "jitter must be a share of the computing time, 0 or more, got -1"),
        ("--steps 0", "steps must be at least 1, got 0"),
        ("--steps 99999999999", "steps must be at most 1,000,000, got 99999999999"),
        ("--data here", "data must be left out: this recipe's data is in the package, got 'here'"),
        ("--emulate params=1e30,forward=1,backward=1", "emulate params must be at most 1e+12, got "),
        ("--emulate resnet50 --steps 0", "steps must be at least 1, got 0"),
    ],
)
def test_wrong_input(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *words.split()]) == 1
    assert told in capsys.readouterr().err
