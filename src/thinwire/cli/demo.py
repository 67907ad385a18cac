"""`thinwire demo`: plans a training on slow hosts, trains it there, and holds one against the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from thinwire.bench.config import DEMO, run_folder
from thinwire.cli import options
from thinwire.cli.bench import carry_out
from thinwire.cli.output import columns, note
from thinwire.cli.plan import measured
from thinwire.events import Summary, read_events
from thinwire.hosts.description import describe
from thinwire.hosts.machine import num_cores
from thinwire.hosts.quantities import format_rate
from thinwire.planner.cluster import stated
from thinwire.units import as_metric, as_ratio

BASELINE, EXACT = "ddp", "all-reduce"
"""DistributedDataParallel sends what exact SGD sends."""
OTHERS = ("gossip-grad:share=0.1", "sasgd", "diloco:interval=10")
"""Two of these are trained beside the recommended one."""
LATENCY_S = 0.5e-3
BUDGET = 0.5


def demo(out: options.Out = None) -> None:
    """Plan a training on four hosts joined by 200 Mbit/s, then train it there: was the plan right?"""
    import torch  # here, so that `--help` does not wait for it

    from thinwire.planner.plan import make_plan

    [study] = DEMO.studies
    note(f"1. the plan: {study.recipe} on {study.workers} hosts at {format_rate(study.rate_bits_per_s)}")
    torch.set_num_threads(1)  # as each worker of the lab has
    work = measured(study.recipe, study.batch_size, None, "cpu")
    crowd = max(1.0, study.workers / num_cores())  # all workers compute on this machine's cores
    hosts = stated(describe(hosts=1, rate=format_rate(study.rate_bits_per_s)), latency_s=LATENCY_S)
    work = replace(work.times(crowd), batch=work.batch)
    plan = make_plan(work, hosts, [study.workers], strategies=[EXACT, "gossip-grad", *OTHERS], budget=BUDGET)
    chosen = plan.recommendation.strategy or EXACT
    note(f"   {plan.recommendation.reason}")
    predicted = {p.strategy: p.step_s for p in plan.predictions}
    predicted[BASELINE] = predicted[EXACT]
    trained = list(dict.fromkeys([BASELINE, chosen, *OTHERS]))[:4]
    note("2. the training, each of them for real:")
    folder = carry_out(DEMO, trained, out)
    found = {name: _summary(run_folder(folder, study, name)) for name in trained}
    typer.echo(_table(trained, predicted, found))
    typer.echo(_sentence(chosen, predicted, found))


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


def _sentence(chosen: str, predicted: dict[str, float], found: dict[str, dict[str, Any] | None]) -> str:
    own, base = found[chosen], found[BASELINE]
    if own is None or base is None:
        return f"\nThe planner said {as_ratio(predicted[BASELINE] / predicted[chosen])}; it was not measured."
    said, was = predicted[BASELINE] / predicted[chosen], base["step_s"] / own["step_s"]
    values = [as_metric(each["metric"], each["value"]) for each in (own, base)]
    return (
        f"\nThe planner said that {chosen} is {as_ratio(said)} as fast as DDP here; it was {as_ratio(was)}, "
        f"with an accuracy of {values[0]} against {values[1]}."
    )
