"""`thinwire report`: what it prints, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.report.made import make_run
from thinwire.cli import main


def test_the_page_is_named_on_stdout_and_the_verdict_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [report]")
    folder = make_run(tmp_path / "run", steps=50, end="not")
    assert main(["report", str(folder)]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{folder / 'report.html'}\n"
    assert captured.err.splitlines() == [
        f"drawing 3 plots into {folder / 'plots'}",
        "note: all-reduce has not finished; its last event is of 2027-01-15 08:00 UTC "
        "(if it no longer runs, it was ended from outside).",
        "digits-cnn on 2 workers with all-reduce has not finished: 50 steps of 100 are done. "
        "So far 30 % of the training time went into waiting for the wire.",
    ]


def test_a_folder_without_events_is_one_error_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [report]")
    assert main(["report", str(tmp_path)]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: no run to report on in {tmp_path}: there are no events")
    assert hint.startswith("hint: name the folder")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", str(make_run(tmp_path / "run"))]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: plots need a package that is not installed")
    assert hint == "hint: pip install 'thinwire[report]'"
