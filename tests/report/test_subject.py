"""The runs found in a folder, and their names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.report.made import make_bench, make_run
from thinwire.errors import DataError
from thinwire.report.findings import verdict
from thinwire.report.subject import Comparison, read_subject


def labels(folder: Path) -> list[str]:
    return [run.label for run in read_subject(folder).runs]


def test_one_run_needs_no_more_than_its_strategy(tmp_path: Path) -> None:
    make_run(tmp_path / "run", settings={"overlap": "backward"})
    assert labels(tmp_path / "run") == labels(tmp_path) == ["all-reduce"]


def test_runs_are_called_by_what_differs(tmp_path: Path) -> None:
    make_run(tmp_path / "a", settings={"overlap": "backward", "same": 1})
    make_run(tmp_path / "b", settings={"overlap": "forward", "same": 1})
    make_run(tmp_path / "c", strategy="silent")
    assert labels(tmp_path) == ["silent", "all-reduce:overlap=backward", "all-reduce:overlap=forward"]
    make_run(tmp_path / "d", strategy="silent", speeds=(1, 1, 1, 1))
    assert labels(tmp_path)[:2] == ["silent, 2 workers", "silent, 4 workers"]
    shutil.copytree(tmp_path / "d", tmp_path / "e")
    assert labels(tmp_path)[1:3] == ["silent, 4 workers (d)", "silent, 4 workers (e)"]


def test_steps_of_runs_are_held_against_the_ceiling_of_as_many_workers(tmp_path: Path) -> None:
    make_run(tmp_path / "a", exposed_share=0.5)
    make_run(tmp_path / "b", strategy="silent", exposed_share=0.0)
    make_run(tmp_path / "c", speeds=(1, 1, 1), exposed_share=0.5)
    found = {(t.system, t.workers): t for t in read_subject(tmp_path).timings}
    efficiency = found["all-reduce", 2].efficiency
    assert efficiency is not None
    assert efficiency.median == pytest.approx(0.5)
    assert found["all-reduce", 3].efficiency is None


def test_runs_of_a_benchmark_are_its_systems(tmp_path: Path) -> None:
    subject = read_subject(make_bench(tmp_path / "bench", workers=(2,), rates=(None,), turns=1))
    assert subject.is_bench
    assert {(t.system, t.family) for t in subject.runs} == {
        ("all-reduce", "ours"),
        ("all-reduce:overlap=forward", "ours"),
        ("ddp", "rival"),
    }


def test_a_benchmark_among_runs_is_pointed_to(tmp_path: Path) -> None:
    make_bench(tmp_path / "bench", workers=(2,), rates=(None,), turns=1, trainings=False)
    make_run(tmp_path / "run")
    (tmp_path / "odd" / "events").mkdir(parents=True)
    subject = read_subject(tmp_path)
    assert not subject.is_bench
    assert subject.notes == [
        f"bench is a benchmark with a page of its own: thinwire report {tmp_path / 'bench'}",
        "odd was left out: there are no events (events/worker-*.jsonl)",
    ]


def test_wrong_folders_are_refused_with_a_way_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for path in (run / "events", run / "events" / "worker-0.jsonl", run / "config.json"):
        with pytest.raises(DataError, match="must be the folder of a run") as caught:
            read_subject(path)
        assert caught.value.hint == f"thinwire report {run}"
    with pytest.raises(DataError, match="does not exist"):
        read_subject(tmp_path / "nowhere")
    (tmp_path / "empty" / "events").mkdir(parents=True)
    with pytest.raises(DataError, match="there are no events"):
        read_subject(tmp_path / "empty")
    (tmp_path / "empty" / "events" / "worker-0.jsonl").write_text("{}\n[]\n")
    with pytest.raises(
        DataError,
        match=r"2 lines of events could not be read \(worker-0.jsonl line 1, worker-0.jsonl line 2\)",
    ):
        read_subject(tmp_path / "empty")


def test_direction_of_the_metric_is_read_off_the_summaries(tmp_path: Path) -> None:
    make_run(tmp_path / "good")
    [run] = read_subject(tmp_path).runs
    target = Comparison([run]).target
    assert target is not None
    assert not target.lower_is_better
    assert target.seconds(run) == pytest.approx(run.values()[2][0])
    text = (tmp_path / "good" / "events" / "worker-0.jsonl").read_text()
    (tmp_path / "good" / "events" / "worker-0.jsonl").write_text(
        text.replace('"target": 0.9, "reached": true', '"target": 0.9, "reached": false')
    )
    [run] = read_subject(tmp_path).runs
    falling = Comparison([run]).target
    assert falling is not None
    assert falling.lower_is_better
    assert falling.seconds(run) == pytest.approx(run.values()[0][0])


def test_a_benchmark_may_aim_lower_than_its_recipes(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "digits")
    table = tmp_path / "time_to_accuracy.json"
    table.write_text('[{"recipe": "digits-cnn", "target": 0.25}, {"recipe": "digits-cnn", "target": null}]')
    [run] = read_subject(tmp_path).runs
    target = Comparison([run]).target
    assert target is not None
    assert target.value == 0.25
    assert target.seconds(run) == pytest.approx(run.values()[0][0])
    for damaged in ("{", '{"recipe": 1}', "[1, {}]"):
        table.write_text(damaged)
        [run] = read_subject(tmp_path).runs
        assert run.aim is None


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (
            "well",
            "digits-cnn on 2 workers with all-reduce came to 98.9 % accuracy in 1.43 seconds of training, ",
        ),
        ("badly", "failed after step 60 of 100: worker 1 on h1: the loss is <nan> & more."),
        ("not", "has not finished: 60 steps of 100 are done. So far 30 % of the training time went into "),
    ],
)
def test_verdict_of_a_run_says_how_it_ended(end: str, words: str, tmp_path: Path) -> None:
    steps = 100 if end == "well" else 60
    make_run(tmp_path / "run", steps=steps, end=end)  # type: ignore[arg-type]
    assert words in verdict(read_subject(tmp_path))


def test_verdict_of_a_comparison_names_the_first_and_the_next(tmp_path: Path) -> None:
    make_run(tmp_path / "a", settings={"x": 1}, exposed_share=0.5)
    make_run(tmp_path / "b", settings={"x": 2}, exposed_share=0.2)
    make_run(tmp_path / "c", strategy="silent", exposed_share=0.0)
    make_run(tmp_path / "d", settings={"x": 3}, end="not", steps=10)
    assert verdict(read_subject(tmp_path)) == (
        "digits-cnn: all-reduce:x=2 reached 90 % accuracy first, after 0.75 seconds of training, "
        "1.60x as fast as all-reduce:x=1 (1.20). 1 run of 4 did not finish."
    )


def test_verdict_of_a_benchmark_is_honest_about_faster_rivals(tmp_path: Path) -> None:
    words = verdict(read_subject(make_bench(tmp_path / "bench", workers=(2, 4), trainings=False)))
    assert words.startswith("At 200 Mbit/s and 4 workers (1.25M parameters + 300 ms compute), all-reduce:")
    assert "as fast as ddp (" in words
    assert "of the ceiling's speed" in words
    assert "The fastest rival there, powersgd-r1, took " in words
    assert "Over the 12 cells where both ran, its speed was " in words
