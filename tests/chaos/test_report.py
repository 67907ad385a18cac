"""Reports: who noticed what when, and what makes a run fail."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.journals import Writer, read
from thinwire.chaos.outcome import Ended, Outcome, Struck
from thinwire.chaos.report import judge
from thinwire.cli.chaos import text_of
from thinwire.hosts.description import parse_fault

KILL = parse_fault("kill:host=1,after=5")


def run_with_a_death(folder: Path, *, resumes: bool = True, model: str = "m") -> Outcome:
    """Three workers; the second one dies."""
    began = Writer.now
    a, b, c = (Writer(folder, host) for host in range(3))
    for rank, each in enumerate((a, b, c)):
        each.trains(1, rank, 3, 0)
        each.step(1, 0, [[0, 1, 2], [3, 4], [5]][rank])
    struck = Struck(Writer.now + 0.05, KILL)
    for each in (a, c):
        each.note("missed", id=b.id, how="dead")
        each.note("adopted", generation=2, lineage="run", ids=[a.id, c.id], me=each.id)
    for rank, each in enumerate((a, c)):
        each.trains(2, rank, 2, 1)
        if resumes:
            each.step(2, 1, [6 + rank])
    for each in (a, c):
        each.epoch(2, [])
        if resumes:
            each.note("ended", generation=2, steps=2, model="m" if each is a else model)
    outcome = Outcome(folder, read(folder), began, [struck])
    outcome.ended = [Ended(0, 0, False), Ended(1, 137, True), Ended(2, 0, False)]
    return outcome


def test_a_death_that_all_go_on_after_passes(tmp_path: Path) -> None:
    report = judge(run_with_a_death(tmp_path))
    assert report.wrong == ()
    (told,) = report.faults
    assert (told.noticed_by, told.how, told.generation, told.workers) == (2, "dead", 2, 2)
    assert 0 < (told.noticed_s or 0) < (told.resumed_s or 0) < 3
    text = text_of(report, tmp_path)
    assert "kill host=1" in text
    assert "pass; output" in text


def test_whoever_ends_with_an_error_or_hangs_fails(tmp_path: Path) -> None:
    outcome = run_with_a_death(tmp_path)
    outcome.ended = [Ended(0, 1, False), Ended(1, 137, True), Ended(2, None, False)]
    wrong = " ".join(judge(outcome).wrong)
    assert "worker 0 ended with status 1" in wrong
    assert "worker 2 had not ended" in wrong


def test_different_models_at_the_end_fail(tmp_path: Path) -> None:
    report = judge(run_with_a_death(tmp_path, model="other"))
    assert report.wrong == ("the workers ended with 2 different models",)
    assert "FAIL" in text_of(report, tmp_path)


def test_a_world_that_makes_no_step_any_more_fails(tmp_path: Path) -> None:
    report = judge(run_with_a_death(tmp_path, resumes=False))
    assert any("made a step" in words for words in report.wrong)
    assert any(words.startswith("samples") for words in report.wrong)
