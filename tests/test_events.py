"""Records, their writer and the reader that follows them."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.events import (
    KINDS,
    Evaluated,
    Event,
    EventReader,
    EventWriter,
    Failed,
    Progress,
    Record,
    RunEnded,
    RunStarted,
    Shrunk,
    StepTimed,
    Summary,
    from_line,
    read_events,
    to_line,
)

RECORDS: list[Record] = [
    RunStarted(config={"seed": 1}, versions={"torch": "2"}, host="h", pid=7, world_size=2),
    Progress(
        step=3,
        num_steps=9,
        epoch=1,
        num_epochs=3,
        loss=0.5,
        samples_per_s=10.0,
        sent_bytes=8,
        exposed_s=0.1,
        train_s=0.2,
        instruments={"share": 0.5},
    ),
    Evaluated(step=3, epoch=1, metric="accuracy", value=0.9, loss=0.1, train_s=0.2),
    RunEnded(
        steps=9,
        rounds=9,
        samples=90,
        sent_bytes=1,
        received_bytes=2,
        messages=3,
        exposed_s=0.4,
        train_s=0.5,
    ),
    Summary(
        recipe="r",
        strategy="s",
        settings={"overlap": "none"},
        workers=2,
        epochs=3,
        steps=9,
        metric="accuracy",
        value=0.9,
        target=0.8,
        reached=True,
        loss=0.1,
        train_s=0.5,
        samples_per_s=20.0,
        sent_bytes=2,
        sent_bytes_per_step=0.1,
        messages=6,
        exposed_share=0.8,
    ),
    StepTimed(
        system="ddp",
        family="rival",
        workers=8,
        rate_bits_per_s=2e8,
        net="params=5e6,layers=16,forward=0.1,backward=0.2",
        turn=1,
        step_s=1.7,
        compute_s=0.3,
        exposed_s=None,
        processor_s=0.05,
        sent_bytes=3.5e7,
        messages=None,
        emulated=True,
        unavailable=None,
    ),
    Shrunk(
        step=6,
        widths={"0": 30},
        num_parameters=400,
        removed=18,
        causes={"dead": 18},
        change=0.01,
        seconds=0.1,
        left_alone={"norm": "a layer norm takes its mean"},
    ),
    Failed(host="h", error="NumericError", message="the loss is nan", hint="lower the rate"),
]
FAILED = RECORDS[-1]


def ticking() -> Iterator[float]:
    return iter([float(second) for second in range(100)])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.kind)
def test_every_kind_survives_a_line(record: Record) -> None:
    event = Event(1.5, 3, record)
    assert from_line(to_line(event).encode()) == event


def test_every_kind_is_tried_above() -> None:
    assert {record.kind for record in RECORDS} == set(KINDS)


def test_lines_are_strict_json() -> None:
    event = Event(
        0.0, 0, Evaluated(step=1, epoch=1, metric="m", value=float("nan"), loss=float("inf"), train_s=0)
    )
    data = json.loads(to_line(event), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert data["value"] is None
    assert data["loss"] is None


def test_writer_stamps_and_reader_merges_workers_by_time(tmp_path: Path) -> None:
    clock = ticking()
    with (
        EventWriter(tmp_path, 0, clock=lambda: next(clock)) as a,
        EventWriter(tmp_path, 1, clock=lambda: next(clock)) as b,
    ):
        a.write(RECORDS[0])
        b.write(RECORDS[1])
        a.write(RECORDS[2])
        assert read_events(tmp_path) == [
            Event(0.0, 0, RECORDS[0]),
            Event(1.0, 1, RECORDS[1]),
            Event(2.0, 0, RECORDS[2]),
        ]


def test_reader_returns_only_what_is_new_and_waits_for_whole_lines(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.poll() == []
    with EventWriter(tmp_path, 0) as writer:
        writer.write(FAILED)
        assert len(reader.poll()) == 1
        assert reader.poll() == []
        line = to_line(Event(5.0, 0, FAILED)) + "\n"
        with writer.path.open("a") as file:
            file.write(line[:20])
            file.flush()
            assert reader.poll() == []
            file.write(line[20:])
        assert [event.time for event in reader.poll()] == [5.0]
    assert reader.damage == []


def test_damaged_and_unknown_lines_are_left_out_and_named(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 0) as writer:
        writer.write(FAILED)
    known = json.loads(to_line(Event(9.0, 0, FAILED)))
    with writer.path.open("ab") as file:
        file.write(b'{"kind": "from_the_future", "time": 1.0, "rank": 0}\n')
        file.write(b"not json \xff\n\n[]\n")
        file.write(json.dumps({**known, "added_later": 1}).encode() + b"\n")
        file.write(b'{"kind": "failed", "time"')  # killed in the middle of a line
    reader = EventReader(tmp_path)
    assert [event.record for event in reader.poll()] == [FAILED, FAILED]
    assert reader.damage == [f"worker-0.jsonl line {number}" for number in (2, 3, 5)]


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1}, {"step": 2**63}, {"step": 1.5}, {"step": "3"}, {"step": True}, {"step": None},
        {"loss": float("nan")}, {"loss": 1e300}, {"loss": "x"}, {"loss": []}, {"instruments": {"share": "x"}},
        {"instruments": []}, {"rank": -1}, {"rank": "0"}, {"time": None}, {"time": 1e12}, {"time": -1.0},
        {"kind": []},
    ],
)  # fmt: skip
def test_a_field_of_another_type_is_damage(change: dict[str, object]) -> None:
    line = {**json.loads(to_line(Event(1.0, 0, RECORDS[1]))), **change}
    assert from_line(json.dumps(line).encode()) is None


@pytest.mark.parametrize(("written", "shown"), [("\\ud83d\\ude00", "\U0001f600"), ("\\udcff", "?")])
def test_text_that_cannot_be_printed_is_replaced(written: str, shown: str) -> None:
    """As names of files that are not UTF-8 are in Python."""
    event = from_line(to_line(Event(1.0, 0, FAILED)).replace("nan", written).encode())
    assert event is not None
    assert isinstance(event.record, Failed)
    assert event.record.message == f"the loss is {shown}"


def test_a_line_that_is_nested_too_deeply_is_damage() -> None:
    assert from_line(b"[" * 100_000) is None


def test_files_that_cannot_be_read_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventWriter(tmp_path, 0) as writer:
        writer.write(FAILED)
    events = writer.path.parent
    os.mkfifo(events / "worker-1.jsonl")
    (events / "worker-2.jsonl").mkdir()
    (events / "worker-3.jsonl").symlink_to("worker-3.jsonl")
    with (events / "worker-4.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr("thinwire.events._MOST_LINE_BYTES", 1 << 10)
    monkeypatch.setattr("thinwire.events._MOST_FILE_BYTES", 1 << 11)
    reader = EventReader(tmp_path)
    assert [event.record for event in reader.poll()] == [FAILED]
    assert reader.poll() == []
    assert reader.damage == [
        "worker-1.jsonl (it is not a regular file)",
        "worker-2.jsonl (it is not a regular file)",
        "worker-3.jsonl (Too many levels of symbolic links)",
        "worker-4.jsonl line 1",
        "worker-4.jsonl line 2",
        "worker-4.jsonl line 3",
        "worker-4.jsonl (it has more than 2,048 bytes)",
    ]


def test_writer_does_not_glue_its_line_to_a_torn_one(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 0) as writer:
        writer.write(FAILED)
    with writer.path.open("a") as file:
        file.write('{"kind": "pro')
    with EventWriter(tmp_path, 0) as writer:
        writer.write(FAILED)
    assert len(read_events(tmp_path)) == 2


def test_fields_with_defaults_may_be_absent() -> None:
    line = '{"kind": "failed", "time": 1, "rank": 0, "host": "h", "error": "E", "message": "m"}'
    event = from_line(line.encode())
    assert event is not None
    assert event.record == Failed(host="h", error="E", message="m")
    assert from_line(line.replace(', "message": "m"', "").encode()) is None


def test_full_disk_ends_the_diary_not_the_training(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 0) as writer:
        writer._file.close()
        writer._file = Path("/dev/full").open("a")  # noqa: SIM115
        with pytest.warns(UserWarning, match="no longer written"):
            writer.write(FAILED)
        writer.write(FAILED)


def test_writing_costs_little(tmp_path: Path) -> None:
    with EventWriter(tmp_path, 0) as writer:
        began = time.process_time()
        for _ in range(200):
            writer.write(RECORDS[1])
        assert (time.process_time() - began) / 200 < 2e-3


def test_a_system_that_could_not_run_has_a_reason_and_no_numbers() -> None:
    timed = next(record for record in RECORDS if isinstance(record, StepTimed))
    absent = dataclasses.replace(
        timed, unavailable="not installed: pip install x", step_s=None, processor_s=None, sent_bytes=None
    )
    event = Event(1.0, 0, absent)
    assert from_line(to_line(event).encode()) == event
