"""The one paragraph a reader takes home, computed from the data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from thinwire.events import Failed
from thinwire.report.runs import Run, seconds_of
from thinwire.report.subject import NamedRun, Subject
from thinwire.report.target import target_of
from thinwire.report.timings import REFERENCE, Timing, best_of_ours, headline, ran, speedups
from thinwire.report.words import net_words, place
from thinwire.units import as_metric, as_percent, as_rate, as_ratio, as_seconds, count, three_digits


def verdict(subject: Subject) -> str:
    """What came out."""
    if len(subject.trainings) == 1 and not subject.is_bench:
        return _one(subject.trainings[0])
    steps = [_bench(subject.timings)] if subject.is_bench else []
    return " ".join([*steps, *(_several(subject.of_recipe(recipe)) for recipe in subject.recipes)])


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
    if REFERENCE in here:
        other_s = here[REFERENCE].median_s
        words += f", {_against(own.median_s, other_s, f'{REFERENCE} ({as_seconds(other_s)})')}"
    if own.efficiency is not None:
        words += f", with {as_percent(own.efficiency.median)} of the ceiling's speed"
    sentences = [words + "."]
    rivals = [timing for timing in here.values() if timing.family == "rival"]
    fastest = min(rivals, key=lambda timing: timing.median_s, default=None)
    if fastest is not None and fastest.system != REFERENCE:
        sentences.append(f"The fastest rival there, {fastest.system}, took {as_seconds(fastest.median_s)}.")
    ratios = list(speedups(found, ours, REFERENCE).values())
    if len(ratios) > 1:
        sentences.append(
            f"Over the {len(ratios)} cells where both ran, its speed was {as_ratio(min(ratios))} to "
            f"{as_ratio(max(ratios))} that of {REFERENCE}, median {as_ratio(statistics.median(ratios))}."
        )
    return " ".join(sentences)


def _against(own_s: float, other_s: float, other: str) -> str:
    """How fast something was, beside another; a difference within 2 % is none."""
    ratio = other_s / max(own_s, 1e-9)
    return f"as fast as {other}" if abs(ratio - 1) < 0.02 else f"{as_ratio(ratio)} as fast as {other}"


def _one(training: NamedRun) -> str:
    run = training.run
    who = f"{run.recipe} on {count(run.world_size, 'worker')} with {training.system}"
    waited = f"{as_percent(run.exposed_share)} of the training time went into waiting for the wire"
    if run.state == "failed":
        return f"{who} failed after step {run.steps}{_of_steps(run)}: {_cause(run)}"
    if run.state == "unfinished":
        return f"{who} has not finished: {run.steps} steps{_of_steps(run)} are done. So far {waited}."
    assert run.summary is not None
    value = run.summary.value
    result = "an unknown value" if value is None else as_metric(run.summary.metric, value)
    reached = "reaching" if run.summary.reached else "missing"
    target = f"{reached} its target of {as_metric(run.summary.metric, run.summary.target)}"
    trained = f"{three_digits(run.train_s)} {run.seconds} of training"
    return f"{who} came to {result} {run.summary.metric} in {trained}, {target}; {waited}."


def _of_steps(run: Run) -> str:
    return f" of {run.num_steps}" if run.num_steps else ""


def _cause(run: Run) -> str:
    first = run.failures[0]
    assert isinstance(first.record, Failed)
    words = first.record.message.rstrip(".")
    return f"{words}." if words.startswith("worker ") else f"worker {first.rank}: {words}."


def _several(trainings: Sequence[NamedRun]) -> str:
    """Who reached the target first, and who next; the ceiling, which trains worse, does not count."""
    recipe, unit = trainings[0].run.recipe, seconds_of(training.run for training in trainings)
    target = target_of(training.run for training in trainings)
    unfinished = [t for t in trainings if t.run.state != "finished"]
    tail = f" {count(len(unfinished), 'run')} of {len(trainings)} did not finish." if unfinished else ""
    competing = [t for t in trainings if t.family != "ceiling"] or trainings
    times = [(s, t.label) for t in competing if target and (s := target.seconds(t.run)) is not None]
    if target is None or not times:
        return f"{recipe}: none of {count(len(competing), 'run')} reached its target.{tail}"
    goal = f"{as_metric(target.metric, target.value)} {target.metric}"
    (first_s, first), *rest = sorted(times)
    words = f"{recipe}: {first} reached {goal} first, after {three_digits(first_s)} {unit} of training"
    if rest:
        next_s, second = rest[0]
        words += f", {_against(first_s, next_s, f'{second} ({three_digits(next_s)})')}"
    return f"{words}.{tail}"
