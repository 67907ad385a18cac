"""Records, each as a line."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.records import FAILED, RECORDS
from thinwire.events import (
    KINDS,
    Evaluated,
    Event,
    Failed,
    Record,
    StepTimed,
    from_line,
    to_line,
)


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


def test_fields_with_defaults_may_be_absent() -> None:
    line = '{"kind": "failed", "time": 1, "rank": 0, "host": "h", "error": "E", "message": "m"}'
    event = from_line(line.encode())
    assert event is not None
    assert event.record == Failed(host="h", error="E", message="m")
    assert from_line(line.replace(', "message": "m"', "").encode()) is None


def test_a_system_that_could_not_run_has_a_reason_and_no_numbers() -> None:
    timed = next(record for record in RECORDS if isinstance(record, StepTimed))
    absent = dataclasses.replace(
        timed, unavailable="not installed: pip install x", step_s=None, processor_s=None, sent_bytes=None
    )
    event = Event(1.0, 0, absent)
    assert from_line(to_line(event).encode()) == event
