"""Time to accuracy as a table: how long each system took to what exact SGD reaches; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.bench.config import BenchConfig, Study, run_folder
from thinwire.bench.systems import BASELINE, CEILING, EXACT
from thinwire.bench.table import Table, as_megabytes, short
from thinwire.events import Evaluated, Failed, Summary, read_events
from thinwire.hosts.rates import format_rate
from thinwire.recipes import registry
from thinwire.recipes.base import Target

SLACK = 0.005
"""Relative: a target of exactly what exact SGD ends with would be a coin toss."""
NOT_RUN = "not run: the time for this study was up, or the benchmark ended before"
COLUMNS = (
    "system",
    "to target, s",
    f"{BASELINE} = 1",
    "at the end",
    "training, s",
    "MB per step",
    "exposed",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One system in one study."""

    recipe: str
    system: str
    metric: str
    target: float | None = None
    seconds_to_target: float | None = None
    """Of training, evaluation left out; None if it was not reached."""
    steps_to_target: int | None = None
    speed_up: float | None = None
    """The baseline's seconds to the target over this one's."""
    value: float | None = None
    """At the end."""
    train_s: float | None = None
    sent_bytes_per_step: float | None = None
    exposed_share: float | None = None
    """None where a system does not tell."""
    unavailable: str | None = None
    caution: str = ""
    """What the strategy said of so short a training."""

    def texts(self) -> tuple[str, ...]:
        """As `COLUMNS` have it."""
        if self.train_s is None or self.value is None:
            return (self.system, short(self.unavailable or "not measured"), *["-"] * (len(COLUMNS) - 2))
        reached = self.seconds_to_target
        return (
            self.system,
            "not reached" if reached is None else f"{reached:.1f}",
            "-" if self.speed_up is None else f"{self.speed_up:.2f}",
            f"{100 * self.value:.1f} %" if self.metric == "accuracy" else f"{self.value:.4g}",
            f"{self.train_s:.1f}",
            "-" if self.sent_bytes_per_step is None else as_megabytes(self.sent_bytes_per_step),
            "-" if self.exposed_share is None else f"{100 * self.exposed_share:.0f} %",
        )


@dataclass(frozen=True, slots=True)
class Curve:
    """What one run said about itself."""

    evaluated: list[Evaluated]
    summary: Summary | None
    failed: str | None

    @staticmethod
    def read(run: Path) -> Curve:
        records = [event.record for event in read_events(run)]
        failures = [r for r in records if isinstance(r, Failed)]
        return Curve(
            [r for r in records if isinstance(r, Evaluated)],
            next((r for r in records if isinstance(r, Summary)), None),
            f"failed: {failures[0].message}" if failures else None,
        )

    def first_to_reach(self, target: Target) -> Evaluated | None:
        """The first evaluation that is as good as the target."""
        return next((e for e in self.evaluated if e.value is not None and target.reached_by(e.value)), None)


def target_of(recipe_target: Target, exact: float) -> Target:
    """The recipe's own target if exact SGD reached it, else nearly what it reached."""
    if recipe_target.reached_by(exact):
        return recipe_target
    slack = 1 - SLACK if recipe_target.higher_is_better else 1 + SLACK
    return Target(
        metric=recipe_target.metric,
        value=exact * slack,
        higher_is_better=recipe_target.higher_is_better,
    )


def rows_of(
    bench: Path, config: BenchConfig, study: Study, absent: Mapping[str, str], *, counted: bool
) -> list[Row]:
    """One row for every system; `counted` says whether interfaces counted bytes."""
    curves = {name: Curve.read(run_folder(bench, study, name)) for name in config.systems}
    own = registry.get(study.recipe).target
    exact = curves[EXACT].summary if EXACT in curves else None
    target = target_of(own, exact.value) if exact is not None and exact.value is not None else own
    reached = {name: curve.first_to_reach(target) for name, curve in curves.items()}
    baseline = reached.get(BASELINE)
    rows = []
    for name, curve in curves.items():
        summary, hit = curve.summary, reached[name]
        if summary is None:
            reason = absent.get(name) or curve.failed or NOT_RUN
            rows.append(Row(recipe=study.recipe, system=name, metric=own.metric, unavailable=reason))
            continue
        tells = summary.messages > 0 or name == CEILING
        rows.append(
            Row(
                recipe=study.recipe,
                system=name,
                metric=own.metric,
                target=target.value,
                seconds_to_target=hit.train_s if hit else None,
                steps_to_target=hit.step if hit else None,
                speed_up=baseline.train_s / hit.train_s if baseline and hit else None,
                value=summary.value,
                train_s=summary.train_s,
                sent_bytes_per_step=summary.sent_bytes_per_step if counted or tells else None,
                exposed_share=summary.exposed_share if tells else None,
                caution=summary.caution,
            )
        )
    return rows


def table_of(study: Study, rows: Sequence[Row], remark: str = "") -> Table:
    """The rows of one study."""
    targets = {row.target for row in rows if row.target is not None}
    target = next(iter(targets), None)
    metric = rows[0].metric
    shown = (
        "unknown" if target is None else f"{100 * target:.1f} %" if metric == "accuracy" else f"{target:.4g}"
    )
    part = "" if study.samples is None else f", first {study.samples:,} samples"
    epochs = f"{study.epochs} epoch{'s' if study.epochs != 1 else ''}"
    notes = [
        f"real training, {epochs}{part}, one run each; target: {metric} {shown}, which exact SGD reaches"
    ]
    notes += [f"{row.system}: {said}" for row in rows if (said := row.unavailable or row.caution)]
    return Table(
        title=f"{study.recipe}, {study.workers} workers at {format_rate(study.rate_bits_per_s)}{remark}",
        columns=COLUMNS,
        rows=tuple(row.texts() for row in rows),
        notes=tuple(notes),
    )


def missing_table(study: Study, reason: str) -> Table:
    """A study that could not be made."""
    return Table(
        title=f"{study.recipe}, {study.workers} workers at {format_rate(study.rate_bits_per_s)}",
        columns=COLUMNS,
        rows=(("(all)", "no data", *["-"] * (len(COLUMNS) - 2)),),
        notes=(reason,),
    )
