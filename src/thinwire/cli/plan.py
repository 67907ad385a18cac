"""`thinwire plan`: what a training would gain from more machines, before anything is changed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thinwire.cli import options
from thinwire.cli.output import note, optional_page
from thinwire.cli.plan_text import against_text, paper_text, text
from thinwire.errors import SettingError, check
from thinwire.files import check_writable
from thinwire.hosts.description import describe
from thinwire.hosts.quantities import parse_counts, parse_duration
from thinwire.lab.nets import parse_net
from thinwire.planner.beside import Beside
from thinwire.planner.cluster import Cluster, stated
from thinwire.planner.workload import Workload
from thinwire.strategies import registry

if TYPE_CHECKING:
    from thinwire.planner.plan import Plan

MOST_WORKERS = 10_000
BUDGET = 1.0
ONLY_WITH = {"layers": ("params",), "data": ("recipe",), "device": ("recipe",)}
"""Options that say something about one kind of model only."""
STATED = {"rate", "latency", "sites", "uplink", "uplink_latency", "slow"}
SHORTEST = "thinwire plan --params 25.6e6 --layers 50 --compute 0.2s"


def plan(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe, measured here for some steps.")
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A script, run here as it is for some steps: 'train.py --x'."),
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
    proposal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with the scaling plot: plan.html.")
    ] = None,
    paper: Annotated[
        str | None, typer.Option(metavar="NAME", help="Published numbers: gtopk, das, diloco, covenant.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Compare with a grid measured in the lab.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Predict step time, speed-up, bytes and accuracy of every strategy, and say which to use."""
    _check_together(context)
    if paper is not None:
        _paper(paper, as_json)
        return
    if against is not None:
        _against(against, as_json)
        return
    counts = parse_counts(workers)
    check(1 < counts[-1] <= MOST_WORKERS, "workers", f"2 to {MOST_WORKERS:,}", counts[-1])
    check(accuracy_budget >= 0, "accuracy budget", "0 or more points", accuracy_budget)
    hosts = _cluster(cluster, counts, rate, sites, uplink, slow or [], latency, uplink_latency)
    sizes = _sizes(recipe, script, params, layers, compute, net)
    if proposal is not None:
        _check_page(proposal)
    if sizes is not None and batch is not None:
        sizes = sizes.with_batch(batch)
    elif sizes is None:
        for each in strategy or []:
            registry.from_text(each)  # refused now, and not when everything has been measured
        sizes = measured(recipe, batch, data, device) if recipe is not None else _run(script, batch, hosts)
    made = _play(sizes, hosts, counts, strategy, accuracy_budget)
    typer.echo(json.dumps(made.as_dict(), indent=1) if as_json else text(made))
    if proposal is not None:
        from thinwire.report.plans import write_proposal

        note(f"page with the scaling plot: {write_proposal(made.as_dict(), proposal)}")


def _paper(name: str, as_json: bool) -> None:
    """Compare the planner with published numbers."""
    from thinwire.planner.published import paper  # which imports torch

    found = paper(name)
    typer.echo(json.dumps(found.as_dict(), indent=1) if as_json else paper_text(found))


def _play(
    sizes: Workload, hosts: Cluster, counts: list[int], strategies: list[str] | None, budget: float
) -> Plan:
    """Play steps of every strategy on the virtual clock, with what links were measured to cost if need be."""
    links = None
    if sizes.on_processor:
        from thinwire.planner.plan import links_of

        note("measuring what each strategy takes from the processor that computes ...")
        links = links_of(sizes, strategies)
    wanted = ", ".join(strategies) if strategies else "all strategies"
    note(f"playing {wanted} with {_listed(counts)} workers on the virtual clock ...")
    with Beside(sizes, hosts, strategies, counts, links) as beside:
        from thinwire.planner.plan import make_plan  # which imports torch

        return make_plan(
            sizes,
            hosts,
            counts,
            strategies=strategies,
            budget=budget,
            told=note,
            links=links,
            beside=beside,
        )


def _check_together(context: typer.Context) -> None:
    """Refuse options that would have no effect beside the others."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    for alone in given & {"paper", "against"}:
        unused = given - {alone, "as_json"}
        _refuse(unused, f"with {_option(alone)}", "it needs no model and no hosts")
    for option, allowed in ONLY_WITH.items():
        if option in given and not given & set(allowed):
            _refuse({option}, f"without {' or '.join(map(_option, allowed))}", "see `thinwire plan --help`")
    if "cluster" in given:
        _refuse(given & STATED, "with --cluster", "the cluster file says rates, times and sites itself")


def _refuse(options: set[str], where: str, hint: str) -> None:
    if options:
        names = ", ".join(map(_option, sorted(options)))
        raise SettingError(f"{names} must be left out {where}", hint=hint)


def _option(name: str) -> str:
    return "RECIPE" if name == "recipe" else f"--{name.replace('_', '-')}"


def _check_page(path: Path) -> None:
    """Refuse a page that cannot be made before anything is measured."""
    from thinwire.report.drawing import style

    check_writable(path)
    with style():  # which needs matplotlib
        pass


def _against(path: Path, as_json: bool) -> None:
    """Predict the cells of a measured grid."""
    from thinwire.planner.against import compare  # which imports torch

    found = compare(path, note)
    typer.echo(json.dumps(found.as_dict(), indent=1) if as_json else against_text(found))
    with optional_page():
        from thinwire.report.drawing import style
        from thinwire.report.plans import against_plot, write_plot

        with style():
            plot = against_plot(found.as_dict()["compared"])
            folder = path if path.is_dir() else path.parent
            note(f"plot: {write_plot(plot, folder)}")


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
    recipe: str | None,
    script: str | None,
    params: float | None,
    layers: int,
    compute: str | None,
    net: str | None,
) -> Workload | None:
    """The model as it was given; None for a recipe or a script, which are measured."""
    ways = {"RECIPE": recipe, "--script": script, "--params": params, "--net": net}
    given = [name for name, value in ways.items() if value is not None]
    hint = f"a recipe, --script train.py, --net resnet50, or sizes: {SHORTEST}"
    if len(given) != 1:
        raise SettingError(f"the model must be given once, got {', '.join(given) or 'none'}", hint=hint)
    check(compute is None or params is not None, "compute", "given with --params", compute, hint=hint)
    if net is not None:
        try:
            return Workload.of_net(parse_net(net))
        except SettingError as error:  # which names the option of the lab
            raise SettingError(error.message.replace("emulate", "net", 1), hint=error.hint) from None
    if params is None:
        return None
    if compute is None:
        raise SettingError("--params needs --compute, the seconds of a step on one machine", hint=hint)
    return Workload.of_sizes(params, layers, parse_duration(compute, field="compute"))


def _run(script: str | None, batch: int | None, hosts: Cluster) -> Workload:
    """A script's model, with the times of some of its steps on this machine."""
    from thinwire.planner.script import LIMIT_S, measure_script

    assert script is not None
    words = _words(script)
    at_once = hosts.workers_per_machine  # in a lab all workers compute on one machine
    times = f", {at_once} at once" if at_once > 1 else ""
    note(
        f"{script}: running it for some steps on this machine, with one thread{times}; "
        f"given up after {LIMIT_S:.0f} s ..."
    )
    found = measure_script(words, at_once=at_once)
    return found if batch is None else replace(found, batch=batch)


def _words(script: str) -> list[str]:
    """A script and its arguments, as a shell would divide them."""
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise SettingError(f"script has a quotation that does not end: {script!r} ({error})") from None
    check(bool(words), "script", "a file, and its arguments", script)
    return words


def measured(recipe: str, batch: int | None, data: Path | None, device: str) -> Workload:
    """A recipe's model with the times of some steps on this machine."""
    from thinwire.planner.measure import STEPS, WARM_UP, StepRecorder
    from thinwire.recipes.config import resolve
    from thinwire.recipes.trial import load

    config = resolve(recipe, "silent", workers=1, batch_size=batch, data=data, device=device)
    note(f"{recipe}: measuring {WARM_UP + STEPS} steps on this machine ...")
    make_steps, num_steps = load(config)
    with StepRecorder().recording() as recorder:
        make_steps(WARM_UP + STEPS)
    found = recorder.workload(recipe, batch=config.batch_size)
    return replace(found, num_steps=num_steps, recipe=recipe)
