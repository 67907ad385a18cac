"""The few numbers that are set large."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.report.runs import Run, seconds_of
from thinwire.report.subject import NamedRun, Subject
from thinwire.report.target import target_of
from thinwire.report.timings import REFERENCE, Timing, best_of_ours, headline, ran, speedups
from thinwire.report.words import place
from thinwire.units import as_bytes, as_metric, as_percent, as_ratio, as_seconds, three_digits

Numbers = list[tuple[str, str, str]]
"""Name, value, and what it is about."""


def key_numbers(subject: Subject) -> Numbers:
    """The numbers of a benchmark, a run or a comparison."""
    if subject.is_bench:
        return _bench(subject.timings)
    if len(subject.trainings) == 1:
        return _run(subject.trainings[0].run)
    return [number for recipe in subject.recipes for number in _compared(subject.of_recipe(recipe))]


def _bench(found: Sequence[Timing]) -> Numbers:
    at, ours = headline(found), best_of_ours(found)
    if at is None or ours is None:
        return []
    here = {timing.system: timing for timing in ran(found, at)}
    numbers: Numbers = []
    ceiling = next((t for t in here.values() if t.family == "ceiling"), None)
    if ceiling is not None:
        numbers.append(("ceiling", as_seconds(ceiling.median_s), f"per step, {place(at)}"))
    if ours in here:
        own = here[ours]
        numbers.append((ours, as_seconds(own.median_s), f"per step, {place(at)}"))
        if own.efficiency is not None:
            numbers.append(
                ("efficiency", as_percent(own.efficiency.median), f"{ours}, of the ceiling's speed")
            )
    ratios = speedups(found, ours, REFERENCE)
    if at in ratios:
        numbers.append((f"against {REFERENCE}", as_ratio(ratios[at]), f"the speed, {place(at)}"))
    return numbers


def _run(run: Run) -> Numbers:
    numbers: Numbers = []
    values = run.values()
    target = target_of([run])
    if values:
        metric = run.evaluated[-1].metric
        aim = f"target {as_metric(metric, target.value)}" if target else "so far"
        numbers.append((metric, as_metric(metric, values[-1][1]), aim))
    if target is not None and (to_target := target.seconds(run)) is not None:
        numbers.append(("to target", f"{three_digits(to_target)} s", f"{run.seconds} of training"))
    return [
        *numbers,
        ("training", f"{three_digits(run.train_s)} s", f"{run.seconds}, {run.steps:,} steps"),
        ("speed", f"{run.samples_per_s:,.0f}", f"samples/s, {as_seconds(run.step_s)} per step"),
        ("exposed", as_percent(run.exposed_share), "of training time spent waiting for the wire"),
        ("sent", as_bytes(run.sent_bytes_per_step), "per step and worker"),
    ]


def _compared(trainings: Sequence[NamedRun]) -> Numbers:
    numbers: Numbers = []
    recipe, unit = trainings[0].run.recipe, seconds_of(training.run for training in trainings)
    target = target_of(training.run for training in trainings)
    competing = [training for training in trainings if training.family != "ceiling"] or trainings
    if target is not None:
        times = [(s, t.label) for t in competing if (s := target.seconds(t.run)) is not None]
        if times:
            seconds, label = min(times)
            numbers.append(("first at target", f"{three_digits(seconds)} s", f"{label}, {recipe} ({unit})"))
    fastest = max(competing, key=lambda training: training.run.samples_per_s)
    speed = f"{fastest.run.samples_per_s:,.0f}"
    numbers.append(("most samples/s", speed, f"{fastest.label}, {recipe}"))
    shares = [(t.exposed_share, t.label) for t in competing if t.exposed_share is not None]
    if shares:
        share, label = min(shares)
        numbers.append(("least exposed", as_percent(share), f"{label}, {recipe}"))
    return numbers
