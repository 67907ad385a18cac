"""Puts the events of a run folder together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from thinwire.events import Evaluated, Event, Failed, Progress, RunEnded, RunStarted, Summary
from thinwire.report.runs import Run, State, Worker

CONFIG = "config.json"
Step = TypeVar("Step", Progress, Evaluated)


def make_run(folder: Path, events: Sequence[Event], skipped: int) -> Run | None:
    """The run that these events tell of; None if they tell of none."""
    starts = [event for event in events if isinstance(event.record, RunStarted)]
    failures = [event for event in events if isinstance(event.record, Failed)]
    evaluated = [event.record for event in events if isinstance(event.record, Evaluated)]
    summary = next((e.record for e in reversed(events) if isinstance(e.record, Summary)), None)
    workers = _workers(events)
    if not workers and not evaluated and summary is None:
        return None
    facts = read_json(folder / CONFIG)
    started = starts[-1].record if starts else None
    world_size = len(workers)
    config, versions = facts.get("config", {}), facts.get("versions", {})
    if isinstance(started, RunStarted):
        world_size, config, versions = started.world_size, started.config, started.versions
    elif summary is not None:
        names = ("recipe", "strategy", "settings", "workers")
        world_size, config = summary.workers, {**{name: getattr(summary, name) for name in names}, **config}
    return Run(
        folder=folder,
        facts=facts,
        config=config,
        versions=versions,
        world_size=world_size,
        workers=tuple(worker for worker in workers if worker.rank < world_size),
        evaluated=tuple(_redone(evaluated)),
        summary=summary,
        failures=tuple(sorted(failures, key=_cause_first)),
        state=_state(events),
        starts=max(Counter(event.rank for event in starts).values(), default=1),
        last_time=max(event.time for event in events),
        skipped=skipped,
    )


def _workers(events: Sequence[Event]) -> list[Worker]:
    hosts = {e.rank: e.record.host for e in events if isinstance(e.record, RunStarted | Failed)}
    progress: dict[int, list[Progress]] = {}
    ended: dict[int, RunEnded] = {}
    for event in events:
        if isinstance(event.record, Progress):
            progress.setdefault(event.rank, []).append(event.record)
            ended.pop(event.rank, None)  # it was resumed
        elif isinstance(event.record, RunEnded):
            ended[event.rank] = event.record
    return [
        Worker(
            rank=rank,
            host=hosts.get(rank, "unknown"),
            progress=tuple(_redone(progress.get(rank, []))),
            ended=ended.get(rank),
        )
        for rank in sorted({*hosts, *progress, *ended})
    ]


def _redone(records: Sequence[Step]) -> list[Step]:
    """Without the steps that a resumed run went back behind and did again."""
    kept: list[Step] = []
    for record in records:
        while kept and kept[-1].step >= record.step:
            kept.pop()
        kept.append(record)
    return kept


def _cause_first(event: Event) -> tuple[bool, float]:
    return isinstance(event.record, Failed) and event.record.consequence, event.time


def _state(events: Sequence[Event]) -> State:
    """How the newest attempt stands: a start puts what its worker said before into the past."""
    state: dict[int, State] = {}
    for event in events:
        match event.record:
            case RunStarted():
                state[event.rank] = "unfinished"
            case Failed():
                state[event.rank] = "failed"
            case Summary():
                state[event.rank] = "finished"
            case _:
                pass
    if "failed" in state.values():
        return "failed"
    return "finished" if "finished" in state.values() else "unfinished"


def read_json(path: Path) -> dict[str, Any]:
    """What a file says about where numbers come from; nothing if it is absent or damaged."""
    content = _content(path)
    return content if isinstance(content, dict) else {}


def read_aims(path: Path) -> dict[str, float]:
    """What a benchmark has each of its recipes aim at, from its table."""
    rows = _content(path)
    return {
        str(row["recipe"]): float(row["target"])
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and "recipe" in row and isinstance(row.get("target"), int | float)
    }


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
