"""The code on pages that promise to run, runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["writing_a_strategy.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 4
    module = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, page, "exec", dont_inherit=True), module)
