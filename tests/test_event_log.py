"""The event files of a run: their writer, and the reader that follows them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.records import FAILED, RECORDS
from thinwire.event_log import EventReader, EventWriter, read_events
from thinwire.events import (
    Event,
    to_line,
)


def ticking() -> Iterator[float]:
    return iter([float(second) for second in range(100)])


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


def test_files_that_cannot_be_read_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventWriter(tmp_path, 0) as writer:
        writer.write(FAILED)
    events = writer.path.parent
    os.mkfifo(events / "worker-1.jsonl")
    (events / "worker-2.jsonl").mkdir()
    (events / "worker-3.jsonl").symlink_to("worker-3.jsonl")
    with (events / "worker-4.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    monkeypatch.setattr("thinwire.event_log._MOST_LINE_BYTES", 1 << 10)
    monkeypatch.setattr("thinwire.event_log._MOST_FILE_BYTES", 1 << 11)
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
