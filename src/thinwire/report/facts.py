"""What was run, where and when: the names and values at the top of a page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from thinwire.report.runs import Run
from thinwire.report.subject import Subject
from thinwire.report.timings import cells, ran
from thinwire.report.words import net_words
from thinwire.units import as_rate, count

Rows = list[tuple[str, str]]


def what_was_run(subject: Subject) -> Rows:
    """The rows that tell a reader what the numbers are about; what is not on record is left out."""
    if subject.is_bench:
        return _bench(subject)
    if len(subject.trainings) == 1:
        return _run(subject.trainings[0].run)
    runs = [training.run for training in subject.trainings]
    return [
        ("runs", f"{len(runs)}: {', '.join(training.label for training in subject.trainings)}"),
        ("recipes", ", ".join(subject.recipes)),
        *_common(runs[0], all_runs=runs),
        ("last event", as_date(max(run.last_time for run in runs))),
    ]


def _run(run: Run) -> Rows:
    settings = ", ".join(f"{name}={value}" for name, value in run.settings.items())
    hosts = sorted({worker.host for worker in run.workers})
    named = ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)} hosts"
    rows = [
        ("recipe", run.recipe),
        ("strategy", f"{run.strategy} ({settings})" if settings else run.strategy),
        ("workers", f"{run.world_size} on {named}" if hosts else str(run.world_size)),
    ]
    if run.summary is not None and run.summary.instruments:
        told = run.summary.instruments.items()
        words = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in told)
        rows.append(("at the end", f"{words} (mean of workers)"))
    per_worker = f"{run.config['batch_size']} per worker" if "batch_size" in run.config else ""
    rows += [("batch", per_worker)] if per_worker else []
    rows += [(name, str(run.config[name])) for name in ("epochs", "seed", "device") if name in run.config]
    rows += _common(run)
    if run.starts > 1:
        rows.append(("resumed", count(run.starts - 1, "time")))
    return [*rows, ("last event", as_date(run.last_time))]


def _common(run: Run, all_runs: list[Run] | None = None) -> Rows:
    """Clock, versions and hardware; of several runs only what is the same for all."""
    runs = all_runs or [run]
    rows: Rows = []
    if run.seconds == "virtual seconds":
        rows.append(("clock", "virtual: what is trained is real, seconds are simulated"))
    same = {
        name: version
        for name, version in run.versions.items()
        if all(other.versions.get(name) == version for other in runs)
    }
    rows += [("versions", ", ".join(f"{name} {version}" for name, version in same.items()))] if same else []
    machines = [_machine(other.facts) for other in runs]
    return [*rows, ("hardware", machines[0])] if machines[0] and len(set(machines)) == 1 else rows


def _machine(facts: Mapping[str, Any]) -> str:
    parts = [str(facts[name]) for name in ("processor", "platform", "kernel") if facts.get(name)]
    cores = [count(facts["cores"], "core")] if isinstance(facts.get("cores"), int) else []
    return ", ".join([*parts, *cores])


def _bench(subject: Subject) -> Rows:
    known = cells(ran(subject.timings))
    rates = dict.fromkeys(cell.rate_bits_per_s for cell in known)
    shaped = [as_rate(rate) for rate in rates if rate is not None]
    turns = sorted({block.turn for block in subject.blocks if block.step_s is not None})
    rows = [
        ("nets", "; ".join(dict.fromkeys(net_words(cell.net) for cell in known)) or "none"),
        ("compute", _compute(subject)),
        ("workers", ", ".join(str(workers) for workers in sorted({cell.workers for cell in known}))),
        ("network", ", ".join([*shaped, *(["loopback, no rate applies"] if None in rates else [])])),
        ("turns", f"{len(turns)}, interleaved; medians with quartiles" if turns else "none"),
    ]
    return [*rows, *_studies(subject.facts), *_provenance(subject.facts)]


def _studies(facts: Mapping[str, Any]) -> Rows:
    """At which rate the trainings of a benchmark ran, which their own folders do not say."""
    rows: Rows = []
    for study in _list(_mapping(facts.get("config")).get("studies")):
        known = _mapping(study)
        if isinstance(known.get("rate_bits_per_s"), float) and isinstance(known.get("workers"), int):
            where = f"{count(known['workers'], 'worker')} at {as_rate(known['rate_bits_per_s'])}"
            rows.append((f"training {known.get('recipe')}", where))
    return rows


def _provenance(facts: Mapping[str, Any]) -> Rows:
    """Code, versions, hardware, and how busy the machine was before and after."""
    begin, end = _mapping(facts.get("begin")), _mapping(facts.get("end"))
    versions = [f"{name} {begin[name]}" for name in ("python", "thinwire", "torch", "numpy") if name in begin]
    changed = len(_list(begin.get("changed_files")))
    commit = str(begin.get("commit", ""))[:12] + (f" and {count(changed, 'changed file')}" if changed else "")
    loads = [
        f"{when} {load[0]:.1f}"
        for when, told in (("before", begin), ("after", end))
        if (load := _list(told.get("load_average")))
    ]
    rows = [
        ("versions", ", ".join(versions)),
        ("code", commit if begin.get("commit") else ""),
        ("hardware", _machine(begin)),
        ("load", ", ".join(loads)),
        ("time", " to ".join(str(p["time"]) for p in (begin, end) if "time" in p)),
        ("command", " ".join(map(str, _list(begin.get("command"))))),
    ]
    return [(name, words) for name, words in rows if words]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _compute(subject: Subject) -> str:
    emulated = {block.emulated for block in subject.blocks if block.step_s is not None}
    if emulated == {True}:
        return "emulated: layers wait as long as an accelerator would take; bytes are real"
    return "real" if emulated == {False} else "emulated for some nets, real for others"


def as_date(at: float) -> str:
    """
    >>> as_date(0.0)
    '1970-01-01 00:00 UTC'
    """
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
