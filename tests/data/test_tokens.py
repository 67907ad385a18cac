"""Texts as token numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.make import write_text
from thinwire.data import files as module
from thinwire.data import load_tokens
from thinwire.errors import DataError


def test_words_are_numbered_by_the_training_text(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a b a\na c\n")
    (tmp_path / "test.txt").write_text("c new a\n")
    tokens = load_tokens(tmp_path)
    assert tokens.words == ("a", "<eos>", "b", "c", "<unk>")
    assert [tokens.words[number] for number in tokens.train] == ["a", "b", "a", "<eos>", "a", "c", "<eos>"]
    assert [tokens.words[number] for number in tokens.test] == ["c", "<unk>", "a", "<eos>"]


def test_rare_words_of_a_large_text_become_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WORDS", 3)
    (tmp_path / "train.txt").write_text("a a a b b\nb c d\n")
    (tmp_path / "test.txt").write_text("a d\n")
    tokens = load_tokens(tmp_path)
    assert tokens.words == ("a", "b", "<unk>")
    assert tokens.test.tolist() == [0, 2, 2]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("where", [".", "ptb"])
def test_plain_and_packed_texts_are_the_same(tmp_path: Path, packed: bool, where: str) -> None:
    write_text(tmp_path / where, packed=packed)
    tokens = load_tokens(tmp_path)
    assert len(tokens.words) == 8
    assert len(tokens.train) == 1500 + 167


def test_missing_and_damaged_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text files in") as caught:
        load_tokens(tmp_path)
    assert "ptb.train.txt" in caught.value.hint
    write_text(tmp_path)
    packed = (tmp_path / "ptb.test.txt.gz").read_bytes()
    (tmp_path / "ptb.test.txt.gz").unlink()
    with pytest.raises(DataError, match=r"lacks ptb.test.txt"):
        load_tokens(tmp_path)
    for broken, words in ((packed[:-9], "damaged"), (b"\xff\xfe\x00", "UTF-8"), (b" ", "no words")):
        (tmp_path / "ptb.test.txt.gz").write_bytes(broken)
        with pytest.raises(DataError, match=words):
            load_tokens(tmp_path)
