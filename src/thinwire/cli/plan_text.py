"""A plan, a paper's table and a comparison with measurements as text."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from thinwire.cli.output import columns
from thinwire.units import as_bytes, as_percent, as_ratio, as_seconds, count, three_digits

if TYPE_CHECKING:
    from thinwire.planner.against import GridComparison
    from thinwire.planner.plan import Plan
    from thinwire.planner.predict import Prediction
    from thinwire.planner.published import Paper


def text(made: Plan) -> str:
    """The plan as tables and sentences."""
    chosen = made.recommendation
    shown = chosen.workers if chosen.strategy is not None else made.counts[-1]
    parts = [_head(made), f"With {count(shown, 'worker')}, the fastest first:", _details(made, shown)]
    if len(made.counts) > 1:
        parts += ["Speed-up over one machine, by number of workers:", _speedups(made)]
    parts += [_balance(made), _groups(made, shown), _verdict(made)]
    return "\n\n".join(part for part in parts if part)


def _head(made: Plan) -> str:
    work, hosts = made.workload, made.cluster
    batch = "" if work.batch is None else f", {work.batch} samples"
    known = f"measured: {hosts.measured}" if hosts.measured else "as stated"
    have = len(hosts.hosts)
    more = f"\nmore than {have} workers: on more hosts like these" if 1 < have < made.counts[-1] else ""
    return (
        f"{work.name}: {work.num_params / 1e6:.3g} M parameters, {as_seconds(work.compute_s)} of computing "
        f"per step{batch}\n{hosts.summary()}, latency {as_seconds(hosts.latency_s)} ({known}, may be off by "
        f"{as_percent(hosts.spread)}){more}"
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


def _groups(made: Plan, workers: int) -> str:
    """The best number of groups for the largest fully connected layer, where splitting it would pay."""
    matrices = [shape for shape in made.workload.shapes if len(shape) == 2]
    if not matrices or made.workload.batch is None or workers == 1:
        return ""
    from thinwire.parallel.volumes import LayerSize, divisors  # a package that imports torch

    ofm, ifm = max(matrices, key=lambda shape: shape[0] * shape[1])
    size = LayerSize(in_features=ifm, out_features=ofm, num_weights=ifm * ofm, rows=made.workload.batch)
    sent = {groups: size.hybrid_bytes(workers, groups, size.better_split) for groups in divisors(workers)}
    groups = min(sent, key=lambda groups: sent[groups])
    if groups == workers:
        return ""
    return (
        f"Hybrid layers: the largest fully connected one ({ofm} x {ifm}) would send least in "
        f"{count(groups, 'group')} of {workers // groups} workers: {as_bytes(sent[groups])} per worker and "
        f"step, data-parallel {as_bytes(sent[workers])} (tw.parallel.hybridize)."
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


def paper_text(found: Paper) -> str:
    """A paper's published numbers beside the planner's."""
    formulas = any(row.formula is not None for row in found.rows)
    rows = [["", "unit", "published", "predicted", "ratio", *(["paper's formula"] if formulas else [])]]
    for row in found.rows:
        numbers = [three_digits(row.published), three_digits(row.predicted), f"{row.ratio:.2f}"]
        by_formula = "-" if row.formula is None else f"{row.formula:.4g}"
        rows.append([row.what, row.unit, *numbers, *([by_formula] if formulas else [])])
    caveats = [f"- {words}" for words in found.caveats]
    parts = [
        f"{found.title}\n{found.source}",
        columns(rows, left=(0, 1)),
        found.finding,
        "\n".join(caveats),
    ]
    return "\n\n".join(part for part in parts if part)


def against_text(found: GridComparison) -> str:
    """Errors by strategy, and overall."""
    rows = [["strategy", "cells", "median error", "worst", "where"]]
    for name in dict.fromkeys(each.strategy for each in found.counted):
        own = [each for each in found.counted if each.strategy == name]
        worst = max(own, key=lambda each: abs(each.error))
        where = f"{worst.workers} workers, {worst.rate}, {worst.net.split(',')[0]}"
        middle = median(abs(each.error) for each in own)
        rows.append([name, str(len(own)), f"{100 * middle:.1f} %", f"{100 * worst.error:+.1f} %", where])
    right, cells = found.picks()
    left_out = len(found.compared) - len(found.counted)
    said = (
        f"{len(found.counted)} measured: median error {100 * found.median_error:.1f} %, worst "
        f"{100 * found.worst.error:+.1f} % ({found.worst.strategy}, {found.worst.workers} workers, "
        f"{found.worst.rate}); {left_out} left out, where the processor was the limit.\n"
        "The strategy predicted to be the fastest was the fastest, or within 5 % of it, in "
        f"{right} of {cells} cells."
    )
    return f"{columns(rows, left=(0, 4))}\n\n{said}"
