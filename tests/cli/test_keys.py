"""`thinwire keys`."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.elastic.keys import KEY_BYTES, read_key
from thinwire.errors import DataError
from thinwire.wire.tls.files import TLS, load


def test_a_new_key_is_for_its_owner_and_replaces_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.key"
    assert main(["keys", "new", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first = read_key(path)
    assert len(first) == KEY_BYTES
    assert main(["keys", "new", str(path)]) == 1
    assert "exists" in capsys.readouterr().err
    assert read_key(path) == first
    assert main(["keys", "new", str(tmp_path / "other.key")]) == 0
    assert read_key(tmp_path / "other.key") != first


def test_a_certificate_is_made_beside_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.key"
    assert main(["keys", "new", "--tls", "--days", "2", str(path)]) == 0
    assert "valid for 2 days" in capsys.readouterr().err
    load(TLS().path(str(path)))
    path.unlink()
    assert main(["keys", "new", "--tls", str(path)]) == 1
    assert "run.pem exists" in capsys.readouterr().err
    assert not path.exists(), "all or nothing"


@pytest.mark.parametrize("text", ["", "abc", "00" * (KEY_BYTES - 1), "zz" * KEY_BYTES])
def test_what_is_no_key_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    path.write_text(text)
    with pytest.raises(DataError, match="holds no key"):
        read_key(path)
