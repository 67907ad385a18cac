"""The words of a page: its title and verdict, notices, key numbers, and the section "What was run"."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.report.runs import Run
from thinwire.report.subject import STUDY, Comparison, Subject, damaged_lines
from thinwire.timings import BASELINE, Timing, best_of_ours, cells, headline, net_words, place, ran, speedups
from thinwire.units import as_bytes, as_metric, as_percent, as_rate, as_ratio, as_seconds, count, three_digits

Facts = list[tuple[str, str]]
Numbers = list[tuple[str, str, str]]
"""Name, value, and what it is about."""


def title(subject: Subject) -> str:
    if subject.is_bench:
        return f"Benchmark {subject.folder.resolve().name}"
    if (run := subject.only_run) is not None:
        return f"{run.recipe}, {run.system}, {count(run.world_size, 'worker')}"
    recipes = ", ".join(compared.recipe for compared in subject.comparisons)
    return f"{recipes}: {len(subject.runs)} runs compared"


def notices(subject: Subject) -> list[str]:
    """Failures, gaps and other limits of the data that a reader must know first."""
    said = []
    for run in subject.runs:
        if run.state == "failed":
            said.append(f"{run.label} failed; its numbers end with step {run.steps}.")
        elif run.state == "unfinished":
            at = as_date(run.last_time)
            ended = "if it no longer runs, it was ended from outside"
            said.append(f"{run.label} has not finished; its last event is of {at} ({ended}).")
        sparse_s, dense_s = (run.instruments.get(name, 0.0) for name in ("sparse_s", "dense_s"))
        if sparse_s > dense_s > 0:  # as top-k strategies tell: both are 0 until they know
            said.append(
                f"{run.label} did not pay there: selecting and sending took {as_seconds(sparse_s)} of "
                "every step, sending everything with all-reduce would have taken about "
                f"{as_seconds(dense_s)}: use all-reduce on such a network (docs/topk.md, 'Does it pay?')."
            )
        if run.summary is not None and run.summary.advice:
            said.append(f"{run.label}: {run.summary.advice}.")
    if any(timing.emulated for timing in subject.timings):
        said.append("Compute was emulated: layers wait as long as an accelerator would take. Bytes are real.")
    if any(timing.processor_full for timing in subject.timings):
        said.append("In cells marked as such the processors of the machine, not the wire, set the time.")
    missing = {t.system: t.unavailable for t in subject.timings if t.unavailable}
    said += [f"{system} could not run: {reason}." for system, reason in missing.items()]
    if subject.damage:
        said.append(f"{damaged_lines(subject.damage)}; the others are shown.")
    return [*said, *subject.notes]


def verdict(subject: Subject) -> str:
    """The result in one or a few sentences."""
    if (run := subject.only_run) is not None:
        return _one(run)
    steps = [_steps(subject.timings)] if subject.is_bench else []
    return " ".join([*steps, *map(_several, subject.comparisons)])


def _steps(found: Sequence[Timing]) -> str:
    at, ours = headline(found), best_of_ours(found)
    if at is None:
        return "No system could be timed; the table says why."
    here = {timing.system: timing for timing in ran(found, at)}
    if ours is None or ours not in here:
        return f"{count(len(here), 'system')} timed at {place(at)}; none of them ours."
    own = here[ours]
    network = "" if at.rate_bits_per_s is None else f"{as_rate(at.rate_bits_per_s)} and "
    words = f"At {network}{count(at.workers, 'worker')} ({net_words(at.net)}), {ours} took "
    words += f"{as_seconds(own.median_s)} per step"
    if BASELINE in here:
        other_s = here[BASELINE].median_s
        words += f", {_against(own.median_s, other_s, f'{BASELINE} ({as_seconds(other_s)})')}"
    if own.efficiency is not None:
        words += f", with {as_percent(own.efficiency.median)} of the ceiling's speed"
    sentences = [words + "."]
    rivals = [timing for timing in here.values() if timing.family == "rival"]
    fastest = min(rivals, key=lambda timing: timing.median_s, default=None)
    if fastest is not None and fastest.system != BASELINE:
        sentences.append(f"The fastest rival there, {fastest.system}, took {as_seconds(fastest.median_s)}.")
    ratios = list(speedups(found, ours, BASELINE).values())
    if len(ratios) > 1:
        sentences.append(
            f"Over the {len(ratios)} cells where both ran, its speed was {as_ratio(min(ratios))} to "
            f"{as_ratio(max(ratios))} that of {BASELINE}, median {as_ratio(statistics.median(ratios))}."
        )
    return " ".join(sentences)


def _against(own_s: float, other_s: float, other: str) -> str:
    """A comparison of two times; differences within 2 % count as equal."""
    ratio = other_s / max(own_s, 1e-9)
    return f"as fast as {other}" if abs(ratio - 1) < 0.02 else f"{as_ratio(ratio)} as fast as {other}"


def _one(run: Run) -> str:
    who = f"{run.recipe} on {count(run.world_size, 'worker')} with {run.system}"
    waited = f"{as_percent(run.exposed_share or 0.0)} of the training time went into waiting for the wire"
    planned = f" of {run.num_steps}" if run.num_steps else ""
    if run.state == "failed":
        first, failed = run.failures[0]
        cause = failed.message.rstrip(".")
        cause = cause if cause.startswith("worker ") else f"worker {first.rank}: {cause}"
        return f"{who} failed after step {run.steps}{planned}: {cause}."
    if run.state == "unfinished":
        return f"{who} has not finished: {run.steps} steps{planned} are done. So far {waited}."
    assert run.summary is not None
    value, metric = run.summary.value, run.summary.metric
    result = "an unknown value" if value is None else as_metric(metric, value)
    reached = "reaching" if run.summary.reached else "missing"
    trained = f"{three_digits(run.train_s)} {run.seconds} of training"
    target = f"{reached} its target of {as_metric(metric, run.summary.target)}"
    return f"{who} came to {result} {metric} in {trained}, {target}; {waited}."


def _several(compared: Comparison) -> str:
    """The first run to reach the target, and the next."""
    target, runs = compared.target, compared.runs
    unfinished = [run for run in runs if run.state != "finished"]
    tail = f" {count(len(unfinished), 'run')} of {len(runs)} did not finish." if unfinished else ""
    times = compared.reached()
    if target is None or not times:
        tried = count(len(compared.competing), "run")
        return f"{compared.recipe}: none of {tried} reached its target.{tail}"
    goal = f"{as_metric(target.metric, target.value)} {target.metric}"
    (first_s, first), *rest = times
    words = f"{compared.recipe}: {first} reached {goal} first, "
    words += f"after {three_digits(first_s)} {compared.seconds} of training"
    if rest:
        next_s, second = rest[0]
        words += f", {_against(first_s, next_s, f'{second} ({three_digits(next_s)})')}"
    return f"{words}.{tail}"


def key_numbers(subject: Subject) -> Numbers:
    """The few numbers that are set large."""
    if subject.is_bench:
        return _numbers_of_steps(subject.timings)
    if (run := subject.only_run) is not None:
        return _numbers_of_run(run)
    return [number for compared in subject.comparisons for number in _numbers_of_several(compared)]


def _numbers_of_steps(found: Sequence[Timing]) -> Numbers:
    at, ours = headline(found), best_of_ours(found)
    if at is None or ours is None:
        return []
    shown = {"ceiling" if timing.family == "ceiling" else timing.system: timing for timing in ran(found, at)}
    timed = [(name, shown[name].median_s) for name in ("ceiling", ours) if name in shown]
    numbers = [(name, as_seconds(step_s), f"per step, {place(at)}") for name, step_s in timed]
    if ours in shown and (share := shown[ours].efficiency) is not None:
        numbers.append(("efficiency", as_percent(share.median), f"{ours}, of the ceiling's speed"))
    ratios = speedups(found, ours, BASELINE)
    if at in ratios:
        numbers.append((f"against {BASELINE}", as_ratio(ratios[at]), f"the speed, {place(at)}"))
    return numbers


def _numbers_of_run(run: Run) -> Numbers:
    numbers: Numbers = []
    compared = Comparison([run])
    target, metric = compared.target, compared.metric
    if values := run.values():
        aim = f"target {as_metric(metric, target.value)}" if target else "so far"
        numbers.append((metric, as_metric(metric, values[-1][1]), aim))
    if target is not None and (to_target := target.seconds(run)) is not None:
        numbers.append(("to target", f"{three_digits(to_target)} s", f"{run.seconds} of training"))
    step_s = as_seconds(run.per_step("train_s"))
    return [
        *numbers,
        ("training", f"{three_digits(run.train_s)} s", f"{run.seconds}, {run.steps:,} steps"),
        ("speed", f"{run.samples_per_s:,.0f}", f"samples/s, {step_s} per step"),
        ("exposed", as_percent(run.exposed_share or 0.0), "of training time spent waiting for the wire"),
        ("sent", as_bytes(run.per_step("sent_bytes")), "per step and worker"),
    ]


def _numbers_of_several(compared: Comparison) -> Numbers:
    numbers: Numbers = []
    recipe, competing = compared.recipe, compared.competing
    if times := compared.reached():
        seconds, label = times[0]
        about = f"{label}, {recipe} ({compared.seconds})"
        numbers.append(("first at target", f"{three_digits(seconds)} s", about))
    fastest = max(competing, key=lambda run: run.samples_per_s)
    numbers.append(("most samples/s", f"{fastest.samples_per_s:,.0f}", f"{fastest.label}, {recipe}"))
    shares = [(run.exposed_share, run.label) for run in competing if run.exposed_share is not None]
    if shares:
        share, label = min(shares)
        numbers.append(("least exposed", as_percent(share), f"{label}, {recipe}"))
    return numbers


def what_was_run(subject: Subject) -> Facts:
    """Configuration, versions, hardware and network; facts that were not recorded are left out."""
    if subject.is_bench:
        facts = [*_grid(subject), *_provenance(subject.facts)]
    elif (run := subject.only_run) is not None:
        facts = _run(run)
    else:
        facts = [
            ("runs", f"{len(subject.runs)}: {', '.join(run.label for run in subject.runs)}"),
            ("recipes", ", ".join(compared.recipe for compared in subject.comparisons)),
            *_common(subject.runs),
            ("last event", as_date(max(run.last_time for run in subject.runs))),
        ]
    return [(name, words) for name, words in facts if words]


def _run(run: Run) -> Facts:
    settings = ", ".join(f"{name}={value}" for name, value in run.settings.items())
    hosts = sorted({worker.host for worker in run.workers})
    named = ", ".join(hosts) if len(hosts) <= 4 else f"{len(hosts)} hosts"
    told = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in run.instruments.items())
    return [
        ("recipe", run.recipe),
        ("strategy", f"{run.strategy} ({settings})" if settings else run.strategy),
        ("workers", f"{run.world_size} on {named}" if hosts else str(run.world_size)),
        ("at the end", f"{told} (mean of workers)" if told else ""),
        ("batch", f"{run.config['batch_size']} per worker" if "batch_size" in run.config else ""),
        *((name, str(run.config.get(name, ""))) for name in ("epochs", "seed", "device")),
        *_common([run]),
        ("resumed", count(run.starts - 1, "time") if run.starts > 1 else ""),
        ("last event", as_date(run.last_time)),
    ]


def _common(runs: Sequence[Run]) -> Facts:
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


def _grid(subject: Subject) -> Facts:
    measured = ran(subject.timings)
    known = cells(measured)
    rates = dict.fromkeys(cell.rate_bits_per_s for cell in known)
    networks = ["loopback, no rate applies" if rate is None else as_rate(rate) for rate in rates]
    turns = max((timing.turns for timing in measured), default=0)
    emulated = {timing.emulated for timing in measured}
    compute = "real" if emulated == {False} else "emulated for some nets, real for others"
    if emulated == {True}:
        compute = "emulated: layers wait as long as an accelerator would take; bytes are real"
    # their rates are not in the folders of the trainings
    studies = [s for s in subject.facts.get("config", {}).get("studies", []) if STUDY.keys() <= s.keys()]
    where = [f"{count(s['workers'], 'worker')} at {as_rate(s['rate_bits_per_s'])}" for s in studies]
    return [
        ("nets", "; ".join(dict.fromkeys(net_words(cell.net) for cell in known)) or "none"),
        ("compute", compute),
        ("workers", ", ".join(str(workers) for workers in sorted({cell.workers for cell in known}))),
        ("network", ", ".join(networks)),
        ("turns", f"{turns}, interleaved; medians with quartiles" if turns else "none"),
        *((f"training {study['recipe']}", words) for study, words in zip(studies, where, strict=True)),
    ]


def _provenance(facts: Mapping[str, Any]) -> Facts:
    """Code, versions, hardware, and how busy the machine was before and after."""
    begin, end = facts.get("begin", {}), facts.get("end", {})
    changed = len(begin.get("changed_files", []))
    commit = begin.get("commit", "")[:12] + (f" and {count(changed, 'changed file')}" if changed else "")
    loads = [(when, told.get("load_average")) for when, told in (("before", begin), ("after", end))]
    packages = [name for name in ("python", "thinwire", "torch", "numpy") if name in begin]
    return [
        ("versions", ", ".join(f"{name} {begin[name]}" for name in packages)),
        ("code", commit if begin.get("commit") else ""),
        ("hardware", _machine(begin)),
        ("load", ", ".join(f"{when} {load[0]:.1f}" for when, load in loads if load)),
        ("time", " to ".join(str(told["time"]) for told in (begin, end) if "time" in told)),
        ("command", " ".join(begin.get("command", []))),
    ]


def as_date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
