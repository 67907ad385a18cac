"""Step times as a table: efficiency against the ceiling, bytes, messages, waiting; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.bench.plan import Cell
from thinwire.bench.systems import BASELINE, CEILING
from thinwire.bench.table import Table, as_megabytes, of_known, short
from thinwire.events import StepTimed
from thinwire.hosts.rates import format_rate
from thinwire.lab.nets import parse_net
from thinwire.spread import Spread

COLUMNS = (
    "system",
    "step, s",
    "quartiles",
    "efficiency",
    f"{BASELINE} = 1",
    "MB sent",
    "messages",
    "exposed, s",
    "processor, s",
)
FULL = "*"
FULL_NOTE = f"{FULL} the processors of this machine, not the wire, set the time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One system in one cell, over all turns; numbers are per step and worker."""

    workers: int
    rate_bits_per_s: float | None
    net: str
    system: str
    family: str
    turns: int
    step_s: Spread | None = None
    efficiency: Spread | None = None
    """The ceiling's step time over this one's, of the same turn."""
    speed_up: Spread | None = None
    """The baseline's step time over this one's, of the same turn."""
    exposed_s: Spread | None = None
    processor_s: Spread | None = None
    sent_bytes: Spread | None = None
    metered_bytes: Spread | None = None
    messages: Spread | None = None
    processor_full: bool = False
    unavailable: str | None = None

    @property
    def cell(self) -> Cell:
        return Cell(self.workers, self.rate_bits_per_s, self.net)

    def texts(self) -> tuple[str, ...]:
        """As `COLUMNS` have it."""
        if self.step_s is None or self.processor_s is None:
            return (self.system, short(self.unavailable or "not measured"), *["-"] * (len(COLUMNS) - 2))
        full = FULL if self.processor_full else ""
        return (
            self.system + full,
            self.step_s.show(3),
            self.step_s.show_quartiles(3),
            "-" if self.efficiency is None else f"{100 * self.efficiency.median:.0f} %",
            "-" if self.speed_up is None else self.speed_up.show(2),
            "-" if self.sent_bytes is None else as_megabytes(self.sent_bytes.median),
            "-" if self.messages is None else self.messages.show(0),
            "-" if self.exposed_s is None else self.exposed_s.show(3),
            self.processor_s.show(3),
        )


def rows_of(records: Sequence[StepTimed], systems: Sequence[str]) -> list[Row]:
    """One row for every system in every cell that was begun."""
    grouped: dict[Cell, dict[str, dict[int, StepTimed]]] = {}
    for record in records:
        cell = Cell(record.workers, record.rate_bits_per_s, record.net)
        grouped.setdefault(cell, {}).setdefault(record.system, {})[record.turn] = record
    return [
        _row(cell, name, found[name], found)
        for cell, found in grouped.items()
        for name in systems
        if name in found
    ]


def _row(
    cell: Cell, name: str, turns: Mapping[int, StepTimed], others: Mapping[str, Mapping[int, StepTimed]]
) -> Row:
    first = next(iter(turns.values()))
    done = {turn: record for turn, record in turns.items() if record.step_s}
    if not done:
        return Row(
            workers=cell.workers,
            rate_bits_per_s=cell.rate_bits_per_s,
            net=cell.net,
            system=name,
            family=first.family,
            turns=0,
            unavailable=first.unavailable,
        )
    records = list(done.values())
    return Row(
        workers=cell.workers,
        rate_bits_per_s=cell.rate_bits_per_s,
        net=cell.net,
        system=name,
        family=first.family,
        turns=len(done),
        step_s=of_known([record.step_s for record in records]),
        efficiency=_against(others.get(CEILING, {}), done),
        speed_up=_against(others.get(BASELINE, {}), done),
        exposed_s=of_known([record.exposed_s for record in records]),
        processor_s=of_known([record.processor_s for record in records]),
        sent_bytes=of_known([record.sent_bytes for record in records]),
        metered_bytes=of_known([record.metered_bytes for record in records]),
        messages=of_known([record.messages for record in records]),
        # Once may have been something else that ran on this machine.
        processor_full=2 * sum(record.processor_full for record in records) > len(records),
    )


def _against(other: Mapping[int, StepTimed], own: Mapping[int, StepTimed]) -> Spread | None:
    """The other's step time over ours, within each turn that both have."""
    pairs = [(other[turn].step_s, own[turn].step_s) for turn in own if turn in other]
    ratios = [theirs / ours for theirs, ours in pairs if theirs and ours]
    return Spread.of(ratios) if ratios else None


def tables_of(rows: Sequence[Row], remark: str = "") -> list[Table]:
    """One table per cell."""
    tables = []
    for cell in dict.fromkeys(row.cell for row in rows):
        own = [row for row in rows if row.cell == cell]
        turns = max(row.turns for row in own)
        notes = [f"medians of {turns} turn{'s' if turns != 1 else ''}; speed as a multiple of {BASELINE}'s"]
        if any(row.processor_full for row in own):
            notes.append(FULL_NOTE)
        notes += [f"{row.system}: {row.unavailable}" for row in own if row.unavailable is not None]
        tables.append(
            Table(
                title=title_of(cell) + remark,
                columns=COLUMNS,
                rows=tuple(row.texts() for row in own),
                notes=tuple(notes),
            )
        )
    return tables


def title_of(cell: Cell) -> str:
    """
    >>> title_of(Cell(8, 200e6, "params=5e6,layers=16,forward=0.1,backward=0.2"))
    '8 workers at 200mbit, 5 M parameters, 0.1 + 0.2 s (16 equal layers, emulated)'
    """
    net = parse_net(cell.net)
    network = "over loopback" if cell.rate_bits_per_s is None else f"at {format_rate(cell.rate_bits_per_s)}"
    seconds = f"{net.forward_s:.3g} + {net.backward_s:.3g} s"
    return (
        f"{cell.workers} workers {network}, {net.num_params / 1e6:.3g} M parameters, {seconds} "
        f"({net.name}, emulated)"
    )
