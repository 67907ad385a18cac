"""The section "What was run": configuration, versions, hardware and network as names and values."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.report.cells import cells, net_words, ran
from thinwire.report.runs import Run
from thinwire.report.subject import Subject
from thinwire.units import as_rate, count

Rows = list[tuple[str, str]]


def what_was_run(subject: Subject) -> Rows:
    """The rows of the section; facts that were not recorded are left out."""
    if subject.is_bench:
        rows = [*_bench(subject), *_provenance(subject.facts)]
    elif (run := subject.only_run) is not None:
        rows = _run(run)
    else:
        rows = [
            ("runs", f"{len(subject.runs)}: {', '.join(run.label for run in subject.runs)}"),
            ("recipes", ", ".join(compared.recipe for compared in subject.comparisons)),
            *_common(subject.runs),
            ("last event", as_date(max(run.last_time for run in subject.runs))),
        ]
    return [(name, words) for name, words in rows if words]


def _run(run: Run) -> Rows:
    settings = ", ".join(f"{name}={value}" for name, value in run.settings.items())
    hosts = sorted({worker.host for worker in run.workers})
    named = ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)} hosts"
    told = run.summary.instruments if run.summary is not None else {}
    instruments = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in told.items())
    return [
        ("recipe", run.recipe),
        ("strategy", f"{run.strategy} ({settings})" if settings else run.strategy),
        ("workers", f"{run.world_size} on {named}" if hosts else str(run.world_size)),
        ("at the end", f"{instruments} (mean of workers)" if instruments else ""),
        ("batch", f"{run.config['batch_size']} per worker" if "batch_size" in run.config else ""),
        *((name, str(run.config.get(name, ""))) for name in ("epochs", "seed", "device")),
        *_common([run]),
        ("resumed", count(run.starts - 1, "time") if run.starts > 1 else ""),
        ("last event", as_date(run.last_time)),
    ]


def _common(runs: Sequence[Run]) -> Rows:
    """The clock of the first run, and the versions and hardware that all share."""
    virtual = runs[0].seconds == "virtual seconds"
    shared = [item for item in runs[0].versions.items() if all(item in run.versions.items() for run in runs)]
    machines = {_machine(run.facts) for run in runs}
    return [
        ("clock", "virtual: what is trained is real, seconds are simulated" if virtual else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in shared)),
        ("hardware", machines.pop() if len(machines) == 1 else ""),
    ]


def _machine(facts: Mapping[str, Any]) -> str:
    parts = [str(facts[name]) for name in ("processor", "platform", "kernel") if facts.get(name)]
    return ", ".join([*parts, *([count(facts["cores"], "core")] if facts.get("cores") else [])])


def _bench(subject: Subject) -> Rows:
    measured = ran(subject.timings)
    known = cells(measured)
    rates = dict.fromkeys(cell.rate_bits_per_s for cell in known)
    networks = [as_rate(rate) for rate in rates if rate is not None]
    networks += ["loopback, no rate applies"] if None in rates else []
    turns = max((timing.turns for timing in measured), default=0)
    emulated = {timing.emulated for timing in measured}
    compute = "real" if emulated == {False} else "emulated for some nets, real for others"
    if emulated == {True}:
        compute = "emulated: layers wait as long as an accelerator would take; bytes are real"
    # their rates are not in the folders of the trainings
    studies = subject.facts.get("config", {}).get("studies", [])
    where = [f"{count(s['workers'], 'worker')} at {as_rate(s['rate_bits_per_s'])}" for s in studies]
    return [
        ("nets", "; ".join(dict.fromkeys(net_words(cell.net) for cell in known)) or "none"),
        ("compute", compute),
        ("workers", ", ".join(str(workers) for workers in sorted({cell.workers for cell in known}))),
        ("network", ", ".join(networks)),
        ("turns", f"{turns}, interleaved; medians with quartiles" if turns else "none"),
        *((f"training {study['recipe']}", words) for study, words in zip(studies, where, strict=True)),
    ]


def _provenance(facts: Mapping[str, Any]) -> Rows:
    """Code, versions, hardware, and how busy the machine was before and after."""
    begin, end = facts.get("begin", {}), facts.get("end", {})
    changed = len(begin.get("changed_files", []))
    commit = begin.get("commit", "")[:12] + (f" and {count(changed, 'changed file')}" if changed else "")
    loads = [(when, told["load_average"][0]) for when, told in (("before", begin), ("after", end)) if told]
    packages = [name for name in ("python", "thinwire", "torch", "numpy") if name in begin]
    return [
        ("versions", ", ".join(f"{name} {begin[name]}" for name in packages)),
        ("code", commit if begin.get("commit") else ""),
        ("hardware", _machine(begin)),
        ("load", ", ".join(f"{when} {load:.1f}" for when, load in loads)),
        ("time", " to ".join(str(told["time"]) for told in (begin, end) if "time" in told)),
        ("command", " ".join(begin.get("command", []))),
    ]


def as_date(at: float) -> str:
    """
    >>> as_date(0.0)
    '1970-01-01 00:00 UTC'
    """
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
