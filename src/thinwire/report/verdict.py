"""The result of a page, computed from the data: a paragraph, and the few numbers that are set large."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from thinwire.report.cells import best_of_ours, headline, net_words, place, ran, speedups
from thinwire.report.runs import Run
from thinwire.report.subject import Comparison, Subject
from thinwire.timings import BASELINE, Timing
from thinwire.units import as_bytes, as_metric, as_percent, as_rate, as_ratio, as_seconds, count, three_digits

Numbers = list[tuple[str, str, str]]
"""Name, value, and what it is about."""


def verdict(subject: Subject) -> str:
    """The result in one or a few sentences."""
    if (run := subject.only_run) is not None:
        return _one(run)
    steps = [_bench(subject.timings)] if subject.is_bench else []
    return " ".join([*steps, *map(_several, subject.comparisons)])


def _bench(found: Sequence[Timing]) -> str:
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
    """The numbers of a benchmark, a run or a comparison."""
    if subject.is_bench:
        return _numbers_of_bench(subject.timings)
    if (run := subject.only_run) is not None:
        return _numbers_of_run(run)
    return [number for compared in subject.comparisons for number in _numbers_of_several(compared)]


def _numbers_of_bench(found: Sequence[Timing]) -> Numbers:
    at, ours = headline(found), best_of_ours(found)
    if at is None or ours is None:
        return []
    shown = {"ceiling" if timing.family == "ceiling" else timing.system: timing for timing in ran(found, at)}
    numbers = [
        (name, as_seconds(shown[name].median_s), f"per step, {place(at)}")
        for name in ("ceiling", ours)
        if name in shown
    ]
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
