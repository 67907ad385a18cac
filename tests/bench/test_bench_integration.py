"""A tiny benchmark from start to end: over loopback with real processes, and in a lab."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.labs import needs_lab
from thinwire.bench.config import QUICK, RUNS, BenchConfig, Study, run_folder
from thinwire.bench.run import BenchSetup, measure, prepare, write_results
from thinwire.errors import ThinwireError
from thinwire.event_log import read_events
from thinwire.events import Event, StepTimed, Summary

TINY: BenchConfig = replace(
    QUICK,
    workers=(2,),
    rates_bits_per_s=(20e6, 100e6),
    nets=("params=2e5,layers=4,forward=0.005,backward=0.01",),
    rivals="tests.bench.some_rivals",
    turns=1,
    block_s=0.2,
    studies=(
        Study(recipe="digits-cnn", workers=2, rate_bits_per_s=100e6, epochs=1, evaluate_every=20, minutes=1),
    ),
)
SYSTEMS = ["silent", "all-reduce", "gossip-grad:share=auto", "gtopk", "ddp", "absent"]


def run(folder: Path, setup: BenchSetup) -> list[StepTimed]:
    """Measure and make the tables; what was seen on the way is what is in the folder."""
    seen: list[Event] = []
    begun: list[str] = []
    measure(folder, setup, lambda _, event: seen.append(event), lambda what, _: begun.append(what))
    assert begun == ["step time, 2 workers", "time to accuracy, digits-cnn"]
    results = write_results(folder, setup)
    records = [event.record for event in read_events(folder)]
    timed = [record for record in records if isinstance(record, StepTimed)]
    assert [event.record for event in seen if isinstance(event.record, StepTimed)] == timed
    for table in (*results["Step time"], *results["Time to accuracy"]):
        assert [row[0].rstrip("*") for row in table.rows] == SYSTEMS
        assert table.rows[-1][1] == "not installed"
        assert "absent: not installed: pip install absent" in table.notes
    said = [note for table in results["Time to accuracy"] for note in table.notes]
    assert sum(note.startswith("gtopk: GTopK with density=0.001 changes a parameter") for note in said) == 1
    names = {path.name for path in folder.iterdir()}
    assert {"bench.json", "events", RUNS, "step_time.md", "step_time.json"} <= names
    rows = json.loads((folder / "time_to_accuracy.json").read_text())
    assert [row["system"] for row in rows] == SYSTEMS
    for system in SYSTEMS[:-1]:
        events = read_events(run_folder(folder, TINY.studies[0], system))
        assert sum(isinstance(event.record, Summary) for event in events) == 1
        assert sum(event.record.kind == "evaluated" for event in events) == 3  # steps 20, 40 and 45
    return timed


@pytest.mark.processes
def test_over_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.bench.run._no_lab", lambda: "no namespaces in this test")
    setup = prepare(TINY, SYSTEMS)
    assert not setup.shaped
    silent, ours, gossip, _, ddp, absent = run(tmp_path, setup)
    assert silent.step_s is not None
    assert silent.step_s >= 0.01
    assert (silent.rate_bits_per_s, silent.sent_bytes, ddp.sent_bytes) == (None, 0, None)
    assert ours.messages
    assert ours.instruments == {}
    assert 0 < gossip.instruments["share"] <= 1
    assert absent.step_s is None
    text = (tmp_path / "step_time.md").read_text()
    assert "Measured over loopback, so rates do not apply: no namespaces in this test" in text
    assert json.loads((tmp_path / "bench.json").read_text())["end"]["cores"] >= 1


@pytest.mark.lab
@needs_lab
def test_what_was_measured_is_kept_when_a_worker_fails(tmp_path: Path) -> None:
    setup = prepare(replace(TINY, rivals="tests.bench.failing_rivals"), ["silent", "failing"])
    with pytest.raises(
        ThinwireError, match=r"the benchmark ended early: worker . on .*: ValueError: on purpose"
    ):
        measure(tmp_path, setup, lambda *_: None, lambda *_: None)
    results = write_results(tmp_path, setup)
    assert [row[0].rstrip("*") for row in results["Step time"][0].rows] == ["silent"]


@pytest.mark.lab
@needs_lab
def test_in_a_lab(tmp_path: Path) -> None:
    setup = prepare(TINY, SYSTEMS)
    assert setup.shaped
    timed = run(tmp_path, setup)
    assert [record.rate_bits_per_s for record in timed[:: len(SYSTEMS)]] == [20e6, 100e6]
    by_name = {(record.system, record.rate_bits_per_s): record for record in timed}
    for system in ("all-reduce", "ddp"):
        slow, fast = by_name[system, 20e6], by_name[system, 100e6]
        assert slow.step_s is not None
        assert fast.step_s is not None
        # 0.8 MB each way at 20 Mbit/s are 0.32 s and cannot be sent faster
        assert slow.step_s > 0.3 > 0.05 < fast.step_s
        assert slow.sent_bytes == pytest.approx(8e5, rel=0.1)
    silent = by_name["silent", 20e6]
    assert silent.sent_bytes is not None
    assert silent.sent_bytes < 5e3
