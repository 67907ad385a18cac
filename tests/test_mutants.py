"""The table of faults fits the code; `python -m tests.mutants` says whether the suite catches them."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_can_be_injected(mutant: Mutant) -> None:
    text = (ROOT / "src" / "thinwire" / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    paths = [word for word in mutant.tests.split() if "/" in word or word.endswith(".py")]
    assert paths
    assert all((ROOT / "tests" / path).exists() for path in paths)


def test_names_are_told_apart() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
