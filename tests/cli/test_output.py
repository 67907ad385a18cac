"""Where results go."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.cli.output import results_folder
from thinwire.errors import SettingError


def test_a_folder_must_be_new_or_empty_or_hold_what_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, again = (results_folder(None, "my.recipes:one/two") for _ in range(2))
    assert first != again
    assert first.parent.name == "runs"
    assert first.name.startswith("my.recipes-one-two-")
    second = results_folder(tmp_path / "a" / "b", "x")
    (second / "file").touch()
    with pytest.raises(SettingError, match="new or empty folder") as caught:
        results_folder(second, "x", hint="name another")
    assert caught.value.hint == "name another"
    assert results_folder(second, "x", may_hold=lambda folder: (folder / "file").exists()) == second
    with pytest.raises(SettingError, match="can be written to"):
        results_folder(second / "file", "x")
