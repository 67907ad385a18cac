"""Odd inputs are refused in words, or accepted. `python -m benchmarks.fuzz` tries thousands of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import fuzz
from thinwire.cli import main


@pytest.fixture
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with fuzz.nothing_starts():
        yield tmp_path / "a"


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_odd_inputs_are_accepted_or_refused_in_words(kind: str, nothing_starts: Path) -> None:
    fuzz.make_originals(nothing_starts)
    wrong: list[dict[str, object]] = []
    counts, _ = fuzz.try_many(kind, 40, 1, nothing_starts, wrong)
    assert not wrong
    assert counts["accepted"] + counts["refused"] == 40
    assert counts["refused"] > 0


@pytest.mark.usefixtures("nothing_starts")
def test_the_fuzzer_tells_a_traceback_and_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def falls(draw: random.Random, folder: Path) -> fuzz.Case:
        return "one", lambda: 1 / 0

    def hangs(draw: random.Random, folder: Path) -> fuzz.Case:
        return "two", lambda: sum(0 for _ in itertools.repeat(None))  # whose steps a signal can interrupt

    monkeypatch.setattr(fuzz, "KINDS", {"falls": (1.0, falls), "hangs": (1.0, hangs)})
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.1)
    assert fuzz.try_one("falls", random.Random(0), Path())[1].startswith("ZeroDivisionError at test_fuzz.py")
    assert fuzz.try_one("hangs", random.Random(0), Path())[1] == "hangs: 0.1 s are over"


@pytest.mark.usefixtures("nothing_starts")
def test_what_the_system_refuses_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "run", "--", "x" * 300 + ".py"]) == 1
    assert capsys.readouterr().err.endswith(".py: File name too long\n")
