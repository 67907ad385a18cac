"""From the events of a bench folder to its tables, for people and as JSON; no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire.bench import accuracy_table, step_table
from thinwire.bench.run import Setting
from thinwire.bench.table import Table
from thinwire.events import StepTimed, read_events


@dataclass(frozen=True, slots=True)
class Results:
    """Both tables, in parts."""

    step_time: list[Table]
    time_to_accuracy: list[Table]


def write_results(folder: Path, setting: Setting) -> Results:
    """Make both tables of what was measured so far, and keep them beside the events."""
    config = setting.config
    remark = "" if setting.shaped else " (loopback: no lab here, so rates do not apply)"
    records = [event.record for event in read_events(folder)]
    timed = [record for record in records if isinstance(record, StepTimed)]
    step_rows = step_table.rows_of(timed, config.systems)
    steps = step_table.tables_of(step_rows)
    accuracy_rows: list[accuracy_table.Row] = []
    accuracy = []
    for study in config.studies:
        if (reason := setting.no_data.get(study.recipe)) is not None:
            accuracy.append(accuracy_table.missing_table(study, reason))
            continue
        rows = accuracy_table.rows_of(folder, config, study, setting.absent, counted=setting.shaped)
        accuracy.append(accuracy_table.table_of(study, rows, remark))
        accuracy_rows += rows
    head = _head(setting, remark)
    _write(folder / "step_time", "Step time", head, steps, step_rows)
    _write(folder / "time_to_accuracy", "Time to accuracy", head, accuracy, accuracy_rows)
    return Results(steps, accuracy)


def _head(setting: Setting, remark: str) -> list[str]:
    lines = []
    if not setting.shaped:
        lines.append(f"Measured over loopback, so rates do not apply: {setting.no_lab}")
    if setting.config.scale != 1:
        lines.append(f"Nets and rates are scaled by {setting.config.scale:g}; seconds are not.")
    if setting.no_rivals is not None:
        lines.append(f"Rivals: {setting.no_rivals}")
    return lines


def _write(place: Path, title: str, head: list[str], tables: Sequence[Table], rows: Sequence[Any]) -> None:
    parts = [f"## {title}", *head, *(table.markdown() for table in tables)]
    place.with_suffix(".md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    content = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    place.with_suffix(".json").write_text(content, encoding="utf-8")
