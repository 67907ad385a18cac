"""Strategies by name and from text."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest

from thinwire.errors import SettingError
from thinwire.strategies import registry
from thinwire.strategies.all_reduce import AllReduce
from thinwire.strategies.base import Strategy
from thinwire.strategies.silent import Silent


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Strategy):
    """A strategy with one setting of each type.

    More about it.
    """

    word: str = "a"
    """Some
    text."""
    whole: int = 1
    number: float = 0.5
    """Any number."""
    switch: bool = False
    choice: Literal["x", "y", 3] = "x"
    perhaps: int | None = None
    automatic: float | Literal["auto"] = "auto"
    strange: list[int] = field(default_factory=list)
    needed: int

    def __post_init__(self) -> None:
        if self.whole < 0:
            raise SettingError("Sample.whole must be at least 0")


@pytest.fixture(autouse=True)
def sample_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KNOWN", {**registry._KNOWN, "sample": f"{__name__}:Sample"})
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Sample.__module__])


def build(**settings: object) -> Any:
    return registry.build("sample", {"needed": "4", **settings})


def test_every_name_builds_with_its_defaults() -> None:
    assert registry.build("silent") == Silent()
    assert registry.build("all-reduce") == AllReduce()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("word", "none", "none"),
        ("whole", "1_000", 1000),
        ("number", "1e-3", 0.001),
        ("switch", "Yes", True),
        ("switch", "false", False),
        ("choice", "y", "y"),
        ("choice", "3", 3),
        ("perhaps", "none", None),
        ("perhaps", "7", 7),
        ("automatic", "auto", "auto"),
        ("automatic", "0.25", 0.25),
        ("strange", [1], [1]),  # not text: taken as it is
    ],
)
def test_text_is_read_by_the_type_of_the_field(name: str, text: object, value: object) -> None:
    built = build(**{name: text})
    assert getattr(built, name) == value
    assert type(getattr(built, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("whole", "1.5", "Sample.whole must be a whole number, got '1.5'"),
        ("number", "much", "Sample.number must be a number, got 'much'"),
        ("switch", "maybe", "Sample.switch must be true or false, got 'maybe'"),
        ("choice", "z", "Sample.choice must be x, y or 3, got 'z'"),
        ("perhaps", "x", "Sample.perhaps must be a whole number or none, got 'x'"),
        ("strange", "1", "Sample.strange must be a value that only Python code can give"),
        ("whole", "-1", "Sample.whole must be at least 0"),
    ],
)
def test_wrong_values_name_field_rule_and_value(name: str, text: str, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        build(**{name: text})
    assert caught.value.message.startswith(words)


def test_unknown_strategy_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingError) as caught:
        registry.build("AllReduce")
    assert "silent, all-reduce" in caught.value.message
    assert caught.value.hint == "did you mean 'all-reduce'?"
    with pytest.raises(SettingError) as caught:
        registry.build("zzz")
    assert "thinwire strategies" in caught.value.hint


def test_unknown_and_missing_settings_are_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="sample has no setting 'wort'") as caught:
        build(wort="x")
    assert "word (text): Some text.; whole (a whole number): ;" in caught.value.hint
    with pytest.raises(SettingError, match="sample needs the setting 'needed'") as caught:
        registry.build("sample")
    with pytest.raises(SettingError) as caught:
        registry.build("silent", {"x": "1"})
    assert caught.value.hint == "silent has no settings"


def test_description_has_defaults_and_the_docs_under_the_fields() -> None:
    description = registry.describe("sample")
    assert description.summary == "A strategy with one setting of each type."
    settings = {setting.name: setting for setting in description.settings}
    assert list(settings) == [each.name for each in fields(Sample)]
    assert settings["word"].doc == "Some text."
    assert settings["whole"].doc == ""
    assert settings["switch"].default == "false"
    assert settings["perhaps"].default == "none"
    assert settings["strange"].default == "[]"
    assert settings["needed"].default is None


def test_every_setting_of_every_strategy_is_documented() -> None:
    for name in set(registry.names()) - {"sample"}:
        description = registry.describe(name)
        assert description.summary.endswith("."), name
        assert all(setting.doc for setting in description.settings), name


def test_resolved_settings_build_the_same_again() -> None:
    built = build(whole="3", automatic="0.1")
    resolved = registry.resolved(built)
    assert resolved["whole"] == 3
    assert "strange" not in resolved
    assert registry.build("sample", resolved) == built


def test_listing_needs_no_torch() -> None:
    code = (
        "import sys; from thinwire.strategies import registry as r; "
        "[r.describe(n) for n in r.names()]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
