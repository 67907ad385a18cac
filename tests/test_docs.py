"""Pages begin with what the reader gets, their code runs, their links lead somewhere, tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import thinwire as tw
from benchmarks import picture, timelines

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")], key=str)


def anchors(page: Path) -> set[str]:
    """Where the headings of a page can be linked to, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", ["writing_a_strategy.md"])
def test_the_code_of_a_page_runs(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 4
    module = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, page, "exec", dont_inherit=True), module)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_a_title_and_a_sentence(page: Path) -> None:
    title, beginning, *_ = re.split(r"\n\s*\n", page.read_text(encoding="utf-8"))
    assert title.startswith("# ")
    assert not beginning.startswith(("```", "|", "#", "- ", "!", "<")), "what does the reader get?"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    for link in ("".join(pair) for pair in links):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_page_of_the_link_has_all_of_it() -> None:
    text = (DOCS / "link.md").read_text(encoding="utf-8")
    attributes = {"rank", "strategy", "world_size"}
    members = attributes | {name for name in vars(tw.Link) if not name.startswith("_")}
    arguments = tw.attach.__annotations__.keys() - {"return"}
    fields = {name for name in dir(tw.Stats) if not name.startswith("_")} - {"traffic"}
    missing = [
        name for name in sorted(members | arguments | fields) if not re.search(rf"`(?:with )?{name}\b", text)
    ]
    assert not missing


def test_the_picture_is_what_the_results_say() -> None:
    for name, theme in picture.THEMES.items():
        assert (DOCS / name).read_text(encoding="utf-8") == picture.draw(theme), (
            "python -m benchmarks.picture"
        )


@pytest.mark.parametrize("name", timelines.PICTURES)
def test_pictures_of_strategies_are_drawn_and_begin_their_pages(name: str) -> None:
    drawn = (DOCS / name).read_text(encoding="utf-8")
    assert drawn == timelines.PICTURES[name]().svg(), "python -m benchmarks.timelines"
    page = (DOCS / name).with_suffix(".md").read_text(encoding="utf-8")
    assert re.split(r"\n\s*\n", page)[2].endswith(f"]({name})")
