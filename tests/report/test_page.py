"""The page as a parser sees it, for every kind of folder."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="plots need the extra [report]")

from tests.report.made import make_bench, make_run
from thinwire.errors import DataError
from thinwire.report.page import write_report

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Collects what the tests ask for, and fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[name] += 1
        if name not in VOID:
            self._open.append(name)
        for key, value in attributes:
            if key == "id":
                self.ids.append(value or "")
            if key in ("href", "src", "xlink:href", "action", "srcset", "poster"):
                self.links.append(value or "")

    def handle_startendtag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(name, attributes)
        if name not in VOID:
            self._open.pop()

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(text)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(folder: Path) -> Page:
    written = write_report(folder)
    assert written.page == folder / "report.html"
    assert all(path.stat().st_size > 1000 for path in written.plots)
    assert {path.suffix for path in written.plots} <= {".svg", ".png"}
    text = written.page.read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags["svg"] == len(written.plots) / 2
    stands_alone(text, page)
    return page


def stands_alone(text: str, page: Page) -> None:
    """Nothing is fetched, nothing is run, ids are unique, and every reference has its end in the page."""
    assert not re.search(r"https?:|//\w+\.\w+/|@import|<script|javascript:|\son\w+=", text)
    assert re.findall(r"url\((?!#)[^)]*\)", text) == []
    assert [name for name, times in Counter(page.ids).items() if times > 1] == []
    targets = {link.removeprefix("#") for link in page.links} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert all(link.startswith("#") for link in page.links)
    assert targets <= set(page.ids)
    assert page.tags["img"] == page.tags["script"] == page.tags["link"] == page.tags["iframe"] == 0


def sections(page: Page) -> list[str]:
    known = ["run", "numbers", "plots", "steps", "trainings", "workers", "failures", "data"]
    return [name for name in page.ids if name in known]


def test_one_run(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", speeds=(1, 0.5, 1)))
    assert sections(page) == ["run", "numbers", "plots", "workers", "data"]
    assert page.tags["svg"] == 3
    assert "slow: computes 2.00x as long as the median" in page.text
    assert "Training loss against seconds" in page.text
    assert "reaching its target of 90 %" in page.text
    assert "late rounds 2.5, share 0.25 (mean of workers)" in page.text


def test_a_strategy_that_does_not_pay_is_announced_with_both_times(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "gtopk", strategy="gtopk"))
    assert "gtopk did not pay there: selecting and sending took 60.0 ms of every step" in page.text
    assert "sending everything with all-reduce would have taken about 30.0 ms" in page.text
    assert "gtopk: GTopK has <few> steps." in page.text
    assert "did not pay" not in page_of(make_run(tmp_path / "topk", strategy="topk")).text


def test_virtual_seconds_are_called_so(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", more={"clock": "virtual"}))
    assert "Training loss against virtual seconds" in page.text
    assert "virtual seconds of training" in page.text
    assert "seconds are simulated" in page.text


@pytest.mark.parametrize("steps", [0, 60])
def test_a_failed_run_says_so_and_escapes_what_it_quotes(steps: int, tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "<b>run</b>", steps=steps, end="badly"))
    assert sections(page)[-2:] == ["failures", "data"]
    assert f"all-reduce failed; its numbers end with step {steps}." in page.text
    assert "worker 1 on h1: the loss is <nan> & more" in page.text
    assert "hint: lower the learning rate" in page.text
    assert page.tags["b"] == page.tags["nan"] == 0


def test_an_unfinished_run_and_damaged_lines_are_announced(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=60, end="not")
    with (folder / "events" / "worker-1.jsonl").open("a") as file:
        file.write("damaged\n")
    page = page_of(folder)
    assert "all-reduce has not finished; its last event is of 2027-01-15 08:00 UTC" in page.text
    assert "1 line of events could not be read" in page.text


def test_several_runs_are_compared(tmp_path: Path) -> None:
    make_run(tmp_path / "a", settings={"x": "$1_{"})
    make_run(tmp_path / "b", settings={"x": "<2>"}, speeds=(1, 1, 1))
    make_run(tmp_path / "c", strategy="silent", exposed_share=0.0)
    page = page_of(tmp_path)
    assert sections(page) == ["run", "numbers", "plots", "trainings", "workers", "data"]
    assert "digits-cnn: 3 runs compared" in page.text
    assert "all-reduce:x=<2>, 3 workers" in page.text
    assert page.tags["details"] == 6  # workers and configuration of each


def test_a_benchmark(tmp_path: Path) -> None:
    page = page_of(make_bench(tmp_path / "bench", workers=(2, 4), rates=(50e6, 200e6), turns=3))
    assert sections(page) == ["run", "numbers", "plots", "steps", "trainings", "workers", "data"]
    assert page.tags["svg"] == 4 + 4 + 2 + 3
    assert "Compute was emulated" in page.text
    assert "training digits-cnn 2 workers at 50 Mbit/s" in page.text
    assert "code 0123456789ab hardware 2 cores load before 0.5, after 1.5" in page.text
    assert page.text.count("not installed: pip install 'thinwire[rivals]'") == 1 + 8
    assert "Efficiency against workers" in page.text


def test_a_benchmark_of_one_size_over_loopback(tmp_path: Path) -> None:
    page = page_of(make_bench(tmp_path / "bench", workers=(2,), rates=(None,), turns=1, trainings=False))
    assert "loopback, no rate applies" in page.text
    assert sections(page) == ["run", "numbers", "plots", "steps", "data"]


def test_simulations_are_compared_by_epoch_and_by_how_far_replicas_are_apart(tmp_path: Path) -> None:
    for strategy in ("all-reduce", "silent"):
        make_run(tmp_path / strategy, strategy=strategy, more={"clock": "virtual"})
    page = page_of(tmp_path)
    assert "Test accuracy against virtual seconds" in page.text
    assert "Test accuracy against epochs" in page.text
    assert "How far replicas are apart" in page.text
    assert (tmp_path / "plots" / "distance-digits-cnn.svg").exists()


def test_a_thousand_workers_do_not_make_a_thousand_rows(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", speeds=[1.0] * 99 + [0.25], steps=10, end="not"))
    assert page.tags["tr"] == 1 + 24
    assert "The 24 of 100 workers that compute longest." in page.text
    assert "slow: computes 4.00x as long as the median" in page.text


def test_the_same_events_give_the_same_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    first = write_report(folder)
    before = [path.read_bytes() for path in (first.page, *first.plots)]
    second = write_report(folder)
    assert before == [path.read_bytes() for path in (second.page, *second.plots)]


def test_svg_files_hold_text_as_text(tmp_path: Path) -> None:
    written = write_report(make_run(tmp_path / "run"))
    loss = next(path for path in written.plots if path.name == "loss-digits-cnn.svg")
    assert "seconds of training</text>" in loss.read_text()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "plots").write_text("in the way")
    with pytest.raises(DataError, match="the report cannot be written into"):
        write_report(folder)
