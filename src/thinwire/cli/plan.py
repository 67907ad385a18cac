"""`thinwire plan`: what a training would gain from more machines, before anything is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli import options
from thinwire.cli.output import columns, note
from thinwire.errors import SettingError, check
from thinwire.hosts.description import describe
from thinwire.hosts.quantities import parse_counts, parse_duration
from thinwire.lab.nets import parse_net
from thinwire.planner.cluster import Cluster, stated
from thinwire.planner.workload import Workload
from thinwire.units import as_bytes, as_percent, as_ratio, as_seconds, count

if TYPE_CHECKING:
    from thinwire.planner.plan import Plan
    from thinwire.planner.predict import Prediction

MOST_WORKERS = 10_000
BUDGET = 1.0
SHORTEST = "thinwire plan --params 25.6e6 --layers 50 --compute 0.2s"


def plan(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe, measured here for some steps.")
    ] = None,
    params: Annotated[float | None, typer.Option(help="Parameters of the model: 25.6e6.")] = None,
    layers: Annotated[int, typer.Option(help="Layers they are in.")] = 50,
    compute: Annotated[str | None, options.time("Computing time of a step on one machine: 0.2s.")] = None,
    net: Annotated[
        str | None, typer.Option(metavar="NET", help=f"A published net instead of sizes: {options.NET}.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per worker and step.")] = None,
    workers: Annotated[str, typer.Option(metavar="N", help="64, or 4,16, or 2..128 (doubling).")] = "2..128",
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", metavar=options.STRATEGY, help="Only these; repeatable. All if left out."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hosts as `thinwire doctor` has measured them.")
    ] = None,
    rate: options.Rate = "1gbit",
    latency: Annotated[str, options.time("Latency between any two hosts.")] = "0.4ms",
    sites: options.Sites = None,
    uplink: options.Uplink = None,
    uplink_latency: Annotated[str, options.time("Added to the latency between sites.")] = "0s",
    slow: options.Slow = None,
    accuracy_budget: Annotated[
        float, typer.Option(metavar="POINTS", help="Points of accuracy that may be lost.")
    ] = BUDGET,
    data: options.Data = None,
    device: options.Device = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Predict step time, speed-up, bytes and accuracy of every strategy, and say which to use."""
    counts = parse_counts(workers)
    check(counts[-1] <= MOST_WORKERS, "workers", f"at most {MOST_WORKERS:,}", counts[-1])
    check(accuracy_budget >= 0, "accuracy budget", "0 or more points", accuracy_budget)
    hosts = _cluster(cluster, counts, rate, sites, uplink, slow or [], latency, uplink_latency)
    sizes = _sizes(recipe, params, layers, compute, net)
    if sizes is not None and batch is not None:
        sizes = sizes.with_batch(batch)
    wanted = f"{count(len(strategy), 'strategy')}" if strategy else "all strategies"
    note(f"playing {wanted} with {_listed(counts)} workers on the virtual clock ...")
    from thinwire.planner.plan import make_plan  # which imports torch

    if sizes is None:
        assert recipe is not None
        sizes = _measured(recipe, batch, data, device)
    made = make_plan(sizes, hosts, counts, strategies=strategy, budget=accuracy_budget, told=note)
    typer.echo(json.dumps(made.as_dict(), indent=1) if as_json else text(made))


def _listed(counts: list[int]) -> str:
    return ", ".join(f"{n:,}" for n in counts)


def _cluster(
    file: Path | None,
    counts: list[int],
    rate: str,
    sites: str | None,
    uplink: str | None,
    slow: list[str],
    latency: str,
    uplink_latency: str,
) -> Cluster:
    if file is not None:
        return Cluster.load(file)
    one_for_all = "," not in rate and "*" not in rate and sites is None and not slow
    num_hosts = 1 if one_for_all else counts[-1]
    described = describe(hosts=num_hosts, rate=rate, sites=sites, uplink=uplink, slow=slow)
    times = {"latency_s": parse_duration(latency, field="latency")}
    times["uplink_latency_s"] = parse_duration(uplink_latency, field="uplink latency")
    return stated(described, **times)


def _sizes(
    recipe: str | None, params: float | None, layers: int, compute: str | None, net: str | None
) -> Workload | None:
    """The model as it was given; None for a recipe, which is measured."""
    given = [name for name, value in (("RECIPE", recipe), ("--params", params), ("--net", net)) if value]
    hint = f"a recipe, --net resnet50, or sizes: {SHORTEST}"
    if len(given) != 1:
        raise SettingError(f"the model must be given once, got {', '.join(given) or 'none'}", hint=hint)
    check(compute is None or params is not None, "compute", "given with --params", compute, hint=hint)
    if net is not None:
        return Workload.of_net(parse_net(net))
    if params is None:
        return None
    if compute is None:
        raise SettingError("--params needs --compute, the seconds of a step on one machine", hint=hint)
    return Workload.of_sizes(params, layers, parse_duration(compute, field="compute"))


def _measured(recipe: str, batch: int | None, data: Path | None, device: str) -> Workload:
    """A recipe's model with the times of some steps on this machine."""
    from dataclasses import replace

    from thinwire.planner.measure import STEPS, WARM_UP, StepRecorder
    from thinwire.recipes.config import resolve
    from thinwire.recipes.trial import load

    config = resolve(recipe, "silent", workers=1, batch_size=batch, data=data, device=device)
    note(f"{recipe}: measuring {WARM_UP + STEPS} steps on this machine ...")
    make_steps, num_steps = load(config)
    with StepRecorder().recording() as recorder:
        make_steps(WARM_UP + STEPS)
    measured = recorder.workload(recipe, batch=config.batch_size)
    return replace(measured, num_steps=num_steps, recipe=recipe)


def text(made: Plan) -> str:
    """The plan as tables and sentences."""
    chosen = made.recommendation
    shown = chosen.workers if chosen.strategy is not None else made.counts[-1]
    parts = [_head(made), f"With {count(shown, 'worker')}, the fastest first:", _details(made, shown)]
    if len(made.counts) > 1:
        parts += ["Speed-up over one machine, by number of workers:", _speedups(made)]
    parts += [_balance(made), _verdict(made)]
    return "\n\n".join(part for part in parts if part)


def _head(made: Plan) -> str:
    work, hosts = made.workload, made.cluster
    batch = "" if work.batch is None else f", {work.batch} samples"
    known = f"measured: {hosts.measured}" if hosts.measured else "as stated"
    return (
        f"{work.name}: {work.num_params / 1e6:.3g} M parameters, {as_seconds(work.compute_s)} of computing "
        f"per step{batch}\n{hosts.summary()}, latency {as_seconds(hosts.latency_s)} ({known}, may be off by "
        f"{as_percent(hosts.spread)})"
    )


def _details(made: Plan, workers: int) -> str:
    head = "strategy|s/step|between|waits|efficiency|speed-up|sent/step|memory|points lost|"
    rows = [head.split("|")]
    chosen = made.recommendation.strategy
    for p in made.with_workers(workers):
        times = [f"{p.step_s:.3g}", f"{p.low_s:.3g} to {p.high_s:.3g}", as_seconds(p.exposed_s)]
        speeds = [as_percent(round(p.efficiency, 2)), as_ratio(p.speedup)]
        mark = "<- recommended" if p.strategy == chosen else p.note
        sent = [as_bytes(p.sent_bytes), as_bytes(p.memory_bytes)]
        rows.append([p.strategy, *times, *speeds, *sent, _loss(p), mark])
    return columns(rows, left=(0, 9))


def _loss(p: Prediction) -> str:
    if p.strategy == "silent":
        return "trains apart"
    return "not measured" if p.loss is None else p.loss.text()


def _speedups(made: Plan) -> str:
    texts = list(dict.fromkeys(p.strategy for p in made.predictions))
    found = {(p.strategy, p.workers): p for p in made.predictions}
    rows = [["strategy", *(f"{n:,}" for n in made.counts)]]
    for name in texts:
        cells = [found.get((name, n)) for n in made.counts]
        rows.append([name, *("-" if p is None else as_ratio(p.speedup) for p in cells)])
    best = [made.best(n) for n in made.counts]
    rows.append(["best within the budget", *("-" if p is None else as_ratio(p.speedup) for p in best)])
    return columns(rows, left=(0,))


def _balance(made: Plan) -> str:
    """Das's smallest batch, in a sentence for each number of workers that has another answer."""
    words = []
    for each in made.balances:
        if each.times is None:
            words.append(f"{each.workers:,}: none is large enough")
        elif each.batch is not None:
            words.append(f"{each.workers:,}: {count(each.batch, 'sample')}")
        else:
            assert each.compute_s is not None
            words.append(f"{each.workers:,}: {as_seconds(each.compute_s)} of computing")
    if not words:
        return ""
    return "Exact SGD hides its communication from this much work per worker and step on, by workers:\n  " + (
        "; ".join(words)
    )


def _verdict(made: Plan) -> str:
    chosen, budget = made.recommendation, made.budget
    use = "stay on one machine" if chosen.strategy is None else f"--strategy {chosen.strategy}"
    lines = [f"Recommended, for at most {budget:g} points of accuracy: {use}", f"  {chosen.reason}"]
    lines += [f"  Faster, but {words}." for words in chosen.passed_over[:4]]
    best = made.best(chosen.workers) if chosen.strategy else None
    if best is not None and best.loss is not None:
        lines.append(f"  Accuracy: {best.loss.basis}.")
    lines += [f"  {chosen.advice}"] if chosen.advice else []
    return "\n".join(lines)
