"""`thinwire demo`: plans a training on slow hosts, trains it there, and holds one against the other."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from thinwire.bench.config import DEMO, Study, run_folder
from thinwire.cli import options
from thinwire.cli.bench import carry_out
from thinwire.cli.output import columns, note
from thinwire.errors import UsageError
from thinwire.event_log import read_events
from thinwire.events import Progress, Summary
from thinwire.hosts.description import describe
from thinwire.hosts.quantities import format_rate
from thinwire.lab.run import Job, run
from thinwire.planner.accuracy import Expected
from thinwire.planner.cluster import Cluster, stated
from thinwire.planner.script import measure_script
from thinwire.planner.workload import Workload
from thinwire.units import as_metric, as_ratio

BASELINE, EXACT = "ddp", "all-reduce"
"""DistributedDataParallel sends what exact SGD sends."""
OTHERS = ("gossip-grad:share=0.1", "sasgd", "diloco:interval=10")
"""Two of these are trained beside the recommended one."""
LATENCY_S = 0.5e-3
DOCTOR_S = 60.0
ALONE = """
from thinwire.recipes import registry
from thinwire.recipes.config import resolve
from thinwire.recipes.train import WorkerContext, train

given = dict(workers=1, epochs=100_000, batch_size={batch!r}, device="cpu")
config = resolve({recipe!r}, "silent", **given)
train(registry.get({recipe!r}), config, WorkerContext(0, 1), lambda event: None)
"""
"""A script that trains a recipe with one worker until it is ended."""
FIRST_STEPS = 8
"""Steps of a training that are not timed: they start connections and load code."""


def demo(out: options.Out = None) -> None:
    """Plan a training on four hosts joined by 400 Mbit/s, then train it there: was the plan right?"""
    from thinwire.planner.plan import links_of, make_plan  # here, so that `--help` does not wait for torch

    [study] = DEMO.studies
    rate = format_rate(study.rate_bits_per_s)
    note(
        f"1. the hosts: {study.workers} emulated on this machine, {rate} each, measured by `thinwire doctor`"
    )
    hosts = _examined(study)
    note(f"2. the plan: {study.recipe}, timed while {study.workers} workers compute at once")
    num_steps, num_tested = _lengths(study)
    work = replace(_timed(study), num_steps=num_steps * study.workers)  # as one worker would make them
    strategies = [EXACT, "gossip-grad", *OTHERS]
    links = links_of(work, strategies)
    plan = make_plan(work, hosts, [study.workers], strategies=strategies, links=links)
    chosen = plan.recommendation.strategy
    note(f"   {plan.recommendation.reason}")
    predicted = {p.strategy: p.step_s for p in plan.predictions}
    predicted[BASELINE] = predicted[EXACT]
    losses = {p.strategy: p.loss for p in plan.predictions}
    trained = list(dict.fromkeys([BASELINE, *filter(None, [chosen]), *OTHERS]))[:4]
    note("3. the training, each of them for real:")
    folder = carry_out(DEMO, trained, out, prints=False)
    found = {name: _summary(run_folder(folder, study, name)) for name in trained}
    typer.echo(_table(trained, predicted, found))
    if chosen is None:
        typer.echo("\nThe planner would have stayed on one machine, as it says above.")
    else:
        typer.echo(_sentence(chosen, predicted, found, losses[chosen], num_tested))
    page = folder / "report.html"
    typer.echo(f"The trainings, drawn: {page if page.exists() else folder}")


def _examined(study: Study) -> Cluster:
    """The hosts as the doctor finds them in the lab; as stated where there can be no lab."""
    lab = describe(hosts=study.workers, rate=format_rate(study.rate_bits_per_s))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        command = ("-m", "thinwire", "doctor", "--out", str(file))
        try:
            ended = run(Job(description=lab, command=command, time_limit_s=DOCTOR_S, prefix=False))
        except UsageError as error:
            note(f"   there is no lab here ({error.message}): the rate is taken as stated")
            return stated(lab, latency_s=LATENCY_S)
        if ended.exit_code != 0 or not file.exists():
            note("   the doctor has failed: the rate is taken as stated")
            return stated(lab, latency_s=LATENCY_S)
        found = Cluster.load(file)
    # The recipe is timed on all of them at once, and the slowest counts: no other speed comes on top.
    return replace(found, hosts=tuple(replace(host, speed=1.0) for host in found.hosts))


def _timed(study: Study) -> Workload:
    """The recipe's steps while as many workers as are to train compute on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{study.recipe}.py"
        script.write_text(ALONE.format(recipe=study.recipe, batch=study.batch_size))
        work = measure_script([str(script)], at_once=study.workers)
    return replace(work, name=study.recipe, recipe=study.recipe)


def _lengths(study: Study) -> tuple[int, int]:
    """Steps of a training, and samples that its accuracy is measured on."""
    from thinwire.recipes import registry
    from thinwire.recipes.config import resolve
    from thinwire.recipes.setup import RunSetup

    given: dict[str, Any] = {"workers": study.workers, "epochs": study.epochs, "batch_size": study.batch_size}
    config = resolve(study.recipe, "silent", device="cpu", **given)
    setup = RunSetup.load(registry.get(study.recipe), config)
    return setup.plan(study.workers).num_steps, len(setup.data.test)


def _summary(run: Path) -> dict[str, Any] | None:
    """Seconds per step after the first ones and the metric of a run; None if it was not trained."""
    events = list(read_events(run)) if run.exists() else []
    summaries = [e.record for e in events if isinstance(e.record, Summary)]
    progress = [e.record for e in events if isinstance(e.record, Progress) and e.rank == 0]
    begun = [each for each in progress if each.step >= FIRST_STEPS]
    if not summaries or summaries[-1].value is None or len(begun) < 2:
        return None
    first, last = begun[0], begun[-1]
    step_s = (last.train_s - first.train_s) / (last.step - first.step)
    return {"step_s": step_s, "value": summaries[-1].value, "metric": summaries[-1].metric}


def _table(trained: list[str], predicted: dict[str, float], found: dict[str, dict[str, Any] | None]) -> str:
    rows = [["", "s/step predicted", "measured", "times ddp predicted", "measured", "accuracy"]]
    base = found[BASELINE]
    for name in trained:
        own, said = found[name], [f"{predicted[name]:.3f}", as_ratio(predicted[BASELINE] / predicted[name])]
        if own is None:
            rows.append([name, said[0], "-", said[1], "-", "not trained"])
            continue
        times = "-" if base is None else as_ratio(base["step_s"] / own["step_s"])
        accuracy = as_metric(own["metric"], own["value"])
        rows.append([name, said[0], f"{own['step_s']:.3f}", said[1], times, accuracy])
    return "\n" + columns(rows, left=(0,))


def _sentence(
    chosen: str,
    predicted: dict[str, float],
    found: dict[str, dict[str, Any] | None],
    loss: Expected | None,
    num_tested: int,
) -> str:
    own, base = found[chosen], found[BASELINE]
    if own is None or base is None:
        return f"\nThe planner said {as_ratio(predicted[BASELINE] / predicted[chosen])}; it was not measured."
    said, was = predicted[BASELINE] / predicted[chosen], base["step_s"] / own["step_s"]
    speeds = (
        f"The planner said that {chosen} is {as_ratio(said)} as fast as DDP here; it was {as_ratio(was)}."
    )
    return f"\n{speeds}\n{_accuracy(own, base, loss, num_tested)}"


def _accuracy(own: dict[str, Any], base: dict[str, Any], loss: Expected | None, num_tested: int) -> str:
    """What was lost, beside what one training may lose: the mean of others, and the chance of two tests."""
    lost = 100 * (base["value"] - own["value"])
    values = [as_metric(each["metric"], each["value"]) for each in (own, base)]
    than = "less" if lost >= 0 else "more"
    words = f"Its accuracy is {values[0]}, that of DDP {values[1]}: {abs(lost):.1f} points {than}"
    if loss is None:
        return f"{words}."
    right = base["value"]
    chance = 2 * 100 * math.sqrt(2 * right * (1 - right) / num_tested)
    margin = math.hypot(loss.high - loss.loss, chance)
    low, high = loss.loss - margin, loss.loss + margin
    return (
        f"{words}. Other trainings have lost {loss.loss:.1f} on average; of a single one with {num_tested} "
        f"test samples {low:+.1f} to {high:+.1f} were to be expected."
    )
