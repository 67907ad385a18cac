"""`thinwire bench` without measuring: what it offers, what it refuses, what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.records import NET, timed
from thinwire.bench.run import BenchSetup
from thinwire.cli import main
from thinwire.event_log import EventWriter


@pytest.fixture
def setups(monkeypatch: pytest.MonkeyPatch) -> list[BenchSetup]:
    """Nothing is measured; what would have been is kept, and two blocks are written down."""
    seen: list[BenchSetup] = []

    def measure(folder: Path, setup: BenchSetup, *_: object) -> None:
        seen.append(setup)
        with EventWriter(folder, 0) as events:
            events.write(timed("silent", step_s=0.3))
            events.write(timed("ddp", step_s=0.6, family="rival"))

    monkeypatch.setattr("thinwire.cli.bench.measure", measure)
    return seen


def test_options_are_these_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.strip().startswith("--")] == [
        "--quick",
        "--workers",
        "--rate",
        "--net",
        "--systems",
        "--rivals",
        "--data",
        "--turns",
        "--time-limit",
        "--scale",
        "--out",
    ]


def test_everything_reaches_the_configuration(
    setups: list[BenchSetup], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"bench --quick --workers 2,8 --rate 50mbit,1gbit --net {NET} --net resnet20 --scale 0.5 --turns 7"
    line += f" --time-limit 90s --systems ddp --out {tmp_path / 'out'}"
    assert main(line.split()) == 0
    config = setups[0].config
    assert (config.workers, config.rates_bits_per_s) == ((2, 8), (50e6, 1e9))
    assert (config.nets, config.scale, config.turns, config.minutes) == ((NET, "resnet20"), 0.5, 7, 1.5)
    assert config.systems == ("silent", "ddp")
    shown = capsys.readouterr()
    assert "8 workers at 200mbit, 5 M parameters" in shown.out
    assert "50 %" in shown.out
    assert "this takes at most about" in shown.err
    assert (tmp_path / "out" / "step_time.md").exists()


def test_absent_rivals_and_data_are_told(
    setups: list[BenchSetup],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("thinwire.bench.run.load_rivals", lambda _: {})
    assert main(["bench", "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert [study.data for study in setups[0].config.studies] == [str(tmp_path)] * 2
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert "not found: run from a checkout" in " ".join(text.split())
    assert "no data" in " ".join(shown.out.split())
    assert set(setups[0].no_data) == {"mnist-cnn", "cifar-resnet20"}
    assert "Rivals: not found" in (tmp_path / "out" / "time_to_accuracy.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--workers two", "workers must be 64, 4,16 or 4..64, got 'two'"),
        ("--workers 1", "workers must be 2 to 64, got 1"),
        ("--rate fast", "rate must be a bandwidth, got 'fast'"),
        ("--net resnet51", "emulate must be one of"),
        ("--systems horovod", "systems must be among silent, all-reduce"),
        ("--rivals no.such", "rivals must be a module, got 'no.such'"),
        ("--systems not_there:Mine", "strategy 'not_there:Mine' cannot be imported"),
        ("--systems all-reduce:overlap", "strategy must be NAME or NAME:KEY=VALUE"),
        ("--time-limit 45", "time limit must be a time, got '45'"),
        ("--turns 0", "turns must be 1 to 1,000, got 0"),
        ("--turns 99999999999999999999", "turns must be 1 to 1,000, got 99999999999999999999"),
        ("--time-limit 1e300h", "time limit must be at most a year (8784h), got '1e300h'"),
        ("--systems ,", "systems must be at least one name, got ','"),
        ("--rivals ../x", "rivals '../x' cannot be imported: '../x' is not the name of a module"),
        ("--quick --data here", "data must be left out: this recipe's data is in the package, got "),
        (
            "--net params=1e12,forward=1,backward=1",
            "net must be of a size that fits: it needs 128,000.0 GB of ",
        ),
        ("--out pyproject.toml", "--out must be a folder that can be written to"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(
    arguments: str, error: str, setups: list[BenchSetup], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments.split()]) == 1
    assert f"error: {error}" in capsys.readouterr().err
    assert setups == []
