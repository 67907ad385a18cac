"""The tables of a benchmark: step times, and time to the accuracy of exact SGD; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from thinwire.bench.config import BenchConfig, Study, run_folder
from thinwire.bench.systems import EXACT
from thinwire.event_log import read_events
from thinwire.events import Evaluated, Failed, StepTimed, Summary
from thinwire.hosts.quantities import format_rate
from thinwire.lab.nets import parse_net
from thinwire.recipes import registry
from thinwire.recipes.base import MetricTarget
from thinwire.timings import BASELINE, CEILING, GridCell, Timing, median_or_dash, timings
from thinwire.units import as_metric, count

STEP_COLUMNS = (
    *("system", "step, s", "quartiles", "efficiency", f"{BASELINE} = 1", "MB sent", "messages"),
    *("exposed, s", "processor, s"),
)
ACCURACY_COLUMNS = (
    *("system", "to target, s", f"{BASELINE} = 1", "at the end", "training, s", "MB per step", "exposed"),
)
FULL = "*"
FULL_NOTE = f"{FULL} the processors of this machine, not the wire, set the time"
SLACK = 0.005
"""Relative; exact SGD's own final value as target would be a coin toss."""
NOT_RUN = "not run: the time for this study was up, or the benchmark ended before"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A titled table; the first column holds words, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"{note}\n" for note in self.notes)])


def as_megabytes(count: float) -> str:
    """
    >>> as_megabytes(7_548_206), as_megabytes(81_673), as_megabytes(527)
    ('7.55', '0.0817', '0')
    """
    return f"{count / 1e6:.3g}" if count >= 1e3 else "0"


def _without_numbers(system: str, reason: str, columns: Sequence[str]) -> tuple[str, ...]:
    """The row of a system that has none: the beginning of the reason; the notes have all of it."""
    return (system, reason.partition(":")[0], *["-"] * (len(columns) - 2))


def step_rows(records: Iterable[StepTimed], systems: Sequence[str]) -> list[Timing]:
    """One row for every system in every cell that was begun: cells as they came, systems in this order."""
    found = timings(record for record in records if record.system in systems)
    cells = list(dict.fromkeys(row.cell for row in found))
    return sorted(found, key=lambda row: (cells.index(row.cell), systems.index(row.system)))


def step_texts(row: Timing) -> tuple[str, ...]:
    """A row's text for each of `STEP_COLUMNS`."""
    if row.step_s is None or row.processor_s is None:
        return _without_numbers(row.system, row.unavailable or "not measured", STEP_COLUMNS)
    return (
        row.system + (FULL if row.processor_full else ""),
        f"{row.step_s.median:.3f}",
        row.step_s.show_quartiles(3),
        median_or_dash(row.efficiency, lambda share: f"{100 * share:.0f} %"),
        median_or_dash(row.speed_up, "{:.2f}".format),
        median_or_dash(row.sent_bytes, as_megabytes),
        median_or_dash(row.messages, "{:.0f}".format),
        median_or_dash(row.exposed_s, "{:.3f}".format),
        f"{row.processor_s.median:.3f}",
    )


def step_tables(rows: Sequence[Timing]) -> list[Table]:
    """One table per cell."""
    tables = []
    for cell in dict.fromkeys(row.cell for row in rows):
        own = [row for row in rows if row.cell == cell]
        turns = count(max(row.turns for row in own), "turn")
        notes = [f"medians of {turns}; speed as a multiple of {BASELINE}'s"]
        notes += [FULL_NOTE] if any(row.processor_full for row in own) else []
        notes += [f"{row.system}: {row.unavailable}" for row in own if row.unavailable is not None]
        shown = tuple(step_texts(row) for row in own)
        tables.append(Table(title=title_of(cell), columns=STEP_COLUMNS, rows=shown, notes=tuple(notes)))
    return tables


def title_of(cell: GridCell) -> str:
    """
    >>> title_of(GridCell(8, 200e6, "params=5e6,layers=16,forward=0.1,backward=0.2"))
    '8 workers at 200mbit, 5 M parameters, 0.1 + 0.2 s (16 equal layers, emulated)'
    """
    net = parse_net(cell.net)
    network = "over loopback" if cell.rate_bits_per_s is None else f"at {format_rate(cell.rate_bits_per_s)}"
    size = f"{net.num_params / 1e6:.3g} M parameters, {net.forward_s:.3g} + {net.backward_s:.3g} s"
    return f"{cell.workers} workers {network}, {size} ({net.name}, emulated)"


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
        """The row's text for each of `ACCURACY_COLUMNS`."""
        if self.train_s is None or self.value is None:
            return _without_numbers(self.system, self.unavailable or "not measured", ACCURACY_COLUMNS)
        reached = self.seconds_to_target
        return (
            self.system,
            "not reached" if reached is None else f"{reached:.1f}",
            "-" if self.speed_up is None else f"{self.speed_up:.2f}",
            as_metric(self.metric, self.value),
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


def accuracy_rows(
    bench: Path, config: BenchConfig, study: Study, absent: Mapping[str, str], *, counted: bool
) -> list[AccuracyRow]:
    """One row for every system; `counted` says whether interfaces counted bytes."""
    runs = {name: read_events(run_folder(bench, study, name)) for name in config.systems}
    records = {name: [event.record for event in events] for name, events in runs.items()}
    summaries = {name: r for name, found in records.items() for r in found if isinstance(r, Summary)}
    exact = summaries[EXACT].value if EXACT in summaries else None
    target = target_of(registry.get(study.recipe).target, exact)
    reached = {
        name: r
        for name, found in records.items()
        for r in reversed(found)  # the earliest one stays
        if isinstance(r, Evaluated) and r.value is not None and target.reached_by(r.value)
    }
    baseline = reached.get(BASELINE)

    def row(name: str) -> AccuracyRow:
        begun = AccuracyRow(recipe=study.recipe, system=name, metric=target.metric)
        summary, hit = summaries.get(name), reached.get(name)
        if summary is None:
            failed = next((f"failed: {r.message}" for r in records[name] if isinstance(r, Failed)), NOT_RUN)
            return replace(begun, unavailable=absent.get(name) or failed)
        tells = summary.messages > 0 or name == CEILING
        return replace(
            begun,
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

    return [row(name) for name in records]


def accuracy_table(study: Study, rows: Sequence[AccuracyRow], remark: str = "", no_data: str = "") -> Table:
    """The rows of one study; without any, the table of a study whose data is missing."""
    title = f"{study.recipe}, {study.workers} workers at {format_rate(study.rate_bits_per_s)}"
    if not rows:
        row = _without_numbers("(all)", "no data", ACCURACY_COLUMNS)
        return Table(title=title, columns=ACCURACY_COLUMNS, rows=(row,), notes=(no_data,))
    metric, target = rows[0].metric, next((row.target for row in rows if row.target is not None), None)
    shown = "unknown" if target is None else as_metric(metric, target)
    part = "" if study.samples is None else f", first {study.samples:,} samples"
    goal = f"target: {metric} {shown}, which exact SGD reaches"
    notes = [f"real training, {count(study.epochs, 'epoch')}{part}, one run each; {goal}"]
    notes += [f"{row.system}: {said}" for row in rows if (said := row.unavailable or row.advice)]
    texts = tuple(row.texts() for row in rows)
    return Table(title=title + remark, columns=ACCURACY_COLUMNS, rows=texts, notes=tuple(notes))
