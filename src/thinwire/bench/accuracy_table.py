"""The table of time to accuracy: how long each system took to the accuracy of exact SGD; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.bench.config import BenchConfig, Study, run_folder
from thinwire.bench.step_table import Table, as_megabytes, without_numbers
from thinwire.bench.systems import EXACT
from thinwire.events import Evaluated, Failed, Summary, read_events
from thinwire.hosts.quantities import format_rate
from thinwire.recipes import registry
from thinwire.recipes.base import MetricTarget
from thinwire.timings import BASELINE, CEILING
from thinwire.units import count

SLACK = 0.005
"""Relative; exact SGD's own final value as target would be a coin toss."""
NOT_RUN = "not run: the time for this study was up, or the benchmark ended before"
COLUMNS = ("system", "to target, s", f"{BASELINE} = 1", "at the end", "training, s", "MB per step", "exposed")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccuracyRow:
    """One system in one study."""

    recipe: str
    system: str
    metric: str
    target: float | None = None
    seconds_to_target: float | None = None
    """Seconds of training, without evaluation; None if it was not reached."""
    steps_to_target: int | None = None
    speed_up: float | None = None
    """The baseline's seconds to the target over this one's."""
    value: float | None = None
    """The metric at the end."""
    train_s: float | None = None
    sent_bytes_per_step: float | None = None
    exposed_share: float | None = None
    """None where a system does not report it."""
    unavailable: str | None = None
    advice: str = ""
    """The strategy's advice about a training of this length."""

    def texts(self) -> tuple[str, ...]:
        """The row's text for each of `COLUMNS`."""
        if self.train_s is None or self.value is None:
            return without_numbers(self.system, self.unavailable or "not measured", COLUMNS)
        reached = self.seconds_to_target
        return (
            self.system,
            "not reached" if reached is None else f"{reached:.1f}",
            "-" if self.speed_up is None else f"{self.speed_up:.2f}",
            _shown(self.metric, self.value),
            f"{self.train_s:.1f}",
            "-" if self.sent_bytes_per_step is None else as_megabytes(self.sent_bytes_per_step),
            "-" if self.exposed_share is None else f"{100 * self.exposed_share:.0f} %",
        )


def target_of(recipe_target: MetricTarget, exact: float | None) -> MetricTarget:
    """The recipe's own target if exact SGD reached it (or did not run), else nearly what it reached."""
    if exact is None or recipe_target.reached_by(exact):
        return recipe_target
    slack = 1 - SLACK if recipe_target.higher_is_better else 1 + SLACK
    return replace(recipe_target, value=exact * slack)


def rows_of(
    bench: Path, config: BenchConfig, study: Study, absent: Mapping[str, str], *, counted: bool
) -> list[AccuracyRow]:
    """One row for every system; `counted` says whether interfaces counted bytes."""
    records = {
        name: [event.record for event in read_events(run_folder(bench, study, name))]
        for name in config.systems
    }
    summaries = {name: r for name, found in records.items() for r in found if isinstance(r, Summary)}
    target = target_of(
        registry.get(study.recipe).target, summaries[EXACT].value if EXACT in summaries else None
    )
    reached = {
        name: r
        for name, found in records.items()
        for r in reversed(found)  # the earliest one stays
        if isinstance(r, Evaluated) and r.value is not None and target.reached_by(r.value)
    }
    baseline = reached.get(BASELINE)
    rows = []
    for name, found in records.items():
        row = AccuracyRow(recipe=study.recipe, system=name, metric=target.metric)
        summary, hit = summaries.get(name), reached.get(name)
        if summary is None:
            failed = next((f"failed: {r.message}" for r in found if isinstance(r, Failed)), NOT_RUN)
            rows.append(replace(row, unavailable=absent.get(name) or failed))
            continue
        tells = summary.messages > 0 or name == CEILING
        rows.append(
            replace(
                row,
                target=target.value,
                seconds_to_target=hit.train_s if hit else None,
                steps_to_target=hit.step if hit else None,
                speed_up=baseline.train_s / hit.train_s if baseline and hit else None,
                value=summary.value,
                train_s=summary.train_s,
                sent_bytes_per_step=summary.sent_bytes_per_step if counted or tells else None,
                exposed_share=summary.exposed_share if tells else None,
                advice=summary.advice,
            )
        )
    return rows


def table_of(study: Study, rows: Sequence[AccuracyRow], remark: str = "") -> Table:
    """The rows of one study."""
    metric, target = rows[0].metric, next((row.target for row in rows if row.target is not None), None)
    shown = "unknown" if target is None else _shown(metric, target)
    part = "" if study.samples is None else f", first {study.samples:,} samples"
    goal = f"target: {metric} {shown}, which exact SGD reaches"
    notes = [f"real training, {count(study.epochs, 'epoch')}{part}, one run each; {goal}"]
    notes += [f"{row.system}: {said}" for row in rows if (said := row.unavailable or row.advice)]
    texts = tuple(row.texts() for row in rows)
    return Table(title=_title(study) + remark, columns=COLUMNS, rows=texts, notes=tuple(notes))


def missing_table(study: Study, reason: str) -> Table:
    """The table of a study whose data is missing."""
    row = without_numbers("(all)", "no data", COLUMNS)
    return Table(title=_title(study), columns=COLUMNS, rows=(row,), notes=(reason,))


def _title(study: Study) -> str:
    return f"{study.recipe}, {study.workers} workers at {format_rate(study.rate_bits_per_s)}"


def _shown(metric: str, value: float) -> str:
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"
