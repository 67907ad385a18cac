"""The rivals as a list: what must be there, and how an absent one is told."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from benchmarks.rivals import all_rivals, find
from thinwire.errors import SettingError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "rivals"


def test_all_are_there_under_their_names() -> None:
    assert list(all_rivals()) == [
        "ddp",
        "ddp-fp16",
        "ddp-powersgd-1",
        "ddp-powersgd-2",
        "ddp-powersgd-4",
        "post-local-sgd",
        "torchft-local-sgd",
        "torchft-diloco",
        "accelerate-local-sgd",
    ]
    assert find("ddp-fp16").name == "ddp-fp16"


def test_an_unknown_one_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"must be one of 'ddp', .*'accelerate-local-sgd', got 'horovod'"):
        find("horovod")


def test_an_absent_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert find("torchft-diloco").available() == "not installed: pip install torchft==0.2.0"
    assert find("accelerate-local-sgd").available() == "not installed: pip install accelerate==1.15.0"
    assert find("ddp").available() is None


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_adapters_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


def test_thinwire_imports_none_of_them() -> None:
    for path in (FOLDER.parents[1] / "src").rglob("*.py"):
        assert not re.search(r"^\s*(import|from) benchmarks", path.read_text(), re.MULTILINE), path
