"""`thinwire demo`: plans a training on slow hosts, trains it there, and holds one against the other."""

from __future__ import annotations

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
from thinwire.events import Summary, read_events
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
BUDGET = 0.5
DOCTOR_S = 60.0
ALONE = """
from thinwire.recipes.config import resolve
from thinwire.recipes.trial import load

steps, _ = load(resolve({recipe!r}, "silent", workers=1, batch_size={batch!r}, device="cpu"))
steps(1_000_000)
"""
"""A script that trains a recipe with one worker until it is ended."""


def demo(out: options.Out = None) -> None:
    """Plan a training on four hosts joined by 200 Mbit/s, then train it there: was the plan right?"""
    from thinwire.planner.plan import make_plan  # here, so that `--help` does not wait for torch

    [study] = DEMO.studies
    rate = format_rate(study.rate_bits_per_s)
    note(
        f"1. the hosts: {study.workers} emulated on this machine, {rate} each, measured by `thinwire doctor`"
    )
    hosts = _examined(study)
    note(f"2. the plan: {study.recipe}, timed while {study.workers} workers compute at once")
    work = _timed(study)
    plan = make_plan(work, hosts, [study.workers], strategies=[EXACT, "gossip-grad", *OTHERS], budget=BUDGET)
    chosen = plan.recommendation.strategy or EXACT
    note(f"   {plan.recommendation.reason}")
    predicted = {p.strategy: p.step_s for p in plan.predictions}
    predicted[BASELINE] = predicted[EXACT]
    losses = {p.strategy: p.loss for p in plan.predictions}
    trained = list(dict.fromkeys([BASELINE, chosen, *OTHERS]))[:4]
    note("3. the training, each of them for real:")
    folder = carry_out(DEMO, trained, out, prints=False)
    found = {name: _summary(run_folder(folder, study, name)) for name in trained}
    typer.echo(_table(trained, predicted, found))
    typer.echo(_sentence(chosen, predicted, found, losses[chosen]))
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


def _summary(run: Path) -> dict[str, Any] | None:
    """Seconds per step and the metric of a run; None if it was not trained."""
    summaries = [e.record for e in read_events(run) if isinstance(e.record, Summary)] if run.exists() else []
    if not summaries or summaries[-1].value is None:
        return None
    last = summaries[-1]
    return {"step_s": last.train_s / last.steps, "value": last.value, "metric": last.metric}


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
) -> str:
    own, base = found[chosen], found[BASELINE]
    if own is None or base is None:
        return f"\nThe planner said {as_ratio(predicted[BASELINE] / predicted[chosen])}; it was not measured."
    said, was = predicted[BASELINE] / predicted[chosen], base["step_s"] / own["step_s"]
    expected = ""
    if loss is not None and loss.high > 0:
        expected = f"; from other trainings, {loss.text()} points less were to be expected"
    values = [as_metric(each["metric"], each["value"]) for each in (own, base)]
    return (
        f"\nThe planner said that {chosen} is {as_ratio(said)} as fast as DDP here; it was {as_ratio(was)}, "
        f"with an accuracy of {values[0]} against {values[1]}{expected}."
    )
