"""What is wrong in a plan or a doctor's start is said in one line, before anything is played or measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.cli.doctor import PORT, place
from thinwire.errors import SettingError

SIZES = ("plan", "--params", "1e6", "--layers", "4", "--compute", "0.1s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SIZES, "--rate=-5mbit"), "rate"),
        ((*SIZES, "--rate=0mbit"), "rate"),
        ((*SIZES, "--latency=-1ms"), "latency"),
        ((*SIZES, "--workers", "0"), "workers"),
        ((*SIZES, "--workers", "20000"), "workers must be 2 to 10,000"),
        ((*SIZES, "--accuracy-budget=-1"), "accuracy budget must be 0 or more points"),
        ((*SIZES, "--cluster", "nowhere.json"), "nowhere.json cannot be read"),
        ((*SIZES, "--workers", "1"), "workers must be 2 to 10,000"),
        ((*SIZES, "--layers", "0"), "error: layers must be 1 to"),
        (("plan", "--net", "resnet51"), "error: net must be one of"),
        (("plan", "--script", "train.py 'x"), "script has a quotation that does not end"),
        (("plan", "--script", ""), "script must be a file"),
        (("plan",), "the model must be given once, got none"),
        (("plan", "--params", "1e6"), "--params needs --compute"),
        (("plan", "--params=-1e6", "--compute", "0.1s"), "params must be a positive number"),
        ((*SIZES, "--workers", "8..2"), "workers must be a smaller number before .. than after it"),
        ((*SIZES, "--cluster", "c.json", "--rate", "1gbit"), "--rate must be left out with --cluster"),
        ((*SIZES, "--data", "there"), "--data must be left out without RECIPE"),
        (("plan", "--net", "resnet50", "--layers", "4"), "--layers must be left out without --params"),
        (("plan", "--paper", "das", "--workers", "4"), "--workers must be left out with --paper"),
        ((*SIZES, "--proposal", "nowhere/plan.html"), "nowhere is no folder that can be written to"),
        ((*SIZES, "--proposal", "/"), "/ cannot be written: it is a folder"),
        (("doctor", "--hosts", "3"), "--hosts, --rank and --first go together"),
    ],
)
def test_wrong_input_is_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out


def test_an_empty_cluster_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.json"
    file.touch()
    assert main((*SIZES, "--cluster", str(file))) == 1
    said = capsys.readouterr().err
    assert "must be a cluster file in JSON" in said
    assert "thinwire doctor" in said


def test_a_host_is_placed_as_torchrun_would() -> None:
    found = place(4, 1, "10.0.0.1")
    assert (found["RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("1", "4", str(PORT))
    assert place(4, 1, "10.0.0.1:999")["MASTER_PORT"] == "999"


@pytest.mark.parametrize("wrong", [(1, 0, "a"), (4, 4, "a"), (4, -1, "a"), (4, 0, ""), (4, 0, "a:x")])
def test_a_host_that_cannot_be_is_refused(wrong: tuple[int, int, str]) -> None:
    with pytest.raises(SettingError, match=r"hosts|rank|first"):
        place(*wrong)
