"""Strategies by name and from text."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Strict(Strategy):
    """A class of a user, with an error of its own."""

    few: int = 1

    def __post_init__(self) -> None:
        if self.few > 3:
            raise ValueError("few must be small")


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


def test_one_grammar_for_known_and_own_strategies() -> None:
    assert registry.parse("topk:density=0.1:payload=int8") == ("topk", {"density": "0.1", "payload": "int8"})
    assert registry.parse(" a.b:C ") == ("a.b:C", {})
    assert registry.parse("a.b:C:k=x=y") == ("a.b:C", {"k": "x=y"})
    assert registry.from_text(f"{__name__}:Sample:needed=4:whole=3") == build(whole=3)
    assert registry.describe(f"{__name__}:Sample").summary == registry.describe("sample").summary


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        (
            "all-reduce:overlap",
            "strategy must be NAME or NAME:KEY=VALUE:KEY=VALUE",
            "for example all-reduce:",
        ),
        ("a.b:C:k", "strategy must be NAME or NAME:KEY=VALUE:KEY=VALUE", "my_module:MyStrategy"),
        (":C", "strategy ':C' cannot be imported: '' is not the name of a module", ""),
        ("silent:k=1:k=2", "setting 'k' must be given once", ""),
        ("not_there:C", "strategy 'not_there:C' cannot be imported: no module 'not_there'", "PYTHONPATH"),
        ("math:C", "strategy 'math:C' cannot be imported: math has no 'C'", "imported from"),
        (f"{__name__}:Sample2", "has no 'Sample2'", "did you mean 'Sample'?"),
        ("math:pi", "must be a dataclass derived from Strategy, got a float", "docs/"),
        ("pathlib:Path", "must be a dataclass derived from Strategy, got the class Path", "docs/"),
        (
            "thinwire.hosts.description:Fault",
            "must be a dataclass derived from Strategy, got the class Fault",
            "",
        ),
        (f"{__name__}:Sample:needed=1:wort=x", "has no setting 'wort'", "it has word (text)"),
        (f"{__name__}:Strict:few=9", "refuses its settings: few must be small", "it has few"),
    ],
)
def test_wrong_texts_are_one_error_with_a_hint(text: str, words: str, hint: str) -> None:
    with pytest.raises(SettingError) as caught:
        registry.from_text(text)
    assert words in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import torhc", "ModuleNotFoundError: No module named 'torhc'"),
        ("x = 1 +", "SyntaxError: "),
        ("1 / 0", "ZeroDivisionError: "),
    ],
)
def test_a_module_with_an_error_names_the_line(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_broken.py").write_text(f"\n{source}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SettingError, match="'own_broken:C' cannot be imported") as caught:
        registry.from_text("own_broken:C")
    assert words in caught.value.message
    assert "own_broken.py, line 2" in caught.value.hint


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


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from thinwire.strategies import registry as r; "
        "assert r.names() and r.parse('gtopk:density=0.1'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
