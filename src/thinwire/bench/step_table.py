"""Tables as text, and those of step times: efficiency, bytes, messages, exposed time; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thinwire.events import StepTimed
from thinwire.hosts.quantities import format_rate
from thinwire.lab.nets import parse_net
from thinwire.timings import BASELINE, GridCell, Timing, timings
from thinwire.units import count

COLUMNS = (
    *("system", "step, s", "quartiles", "efficiency", f"{BASELINE} = 1", "MB sent", "messages"),
    *("exposed, s", "processor, s"),
)
FULL = "*"
FULL_NOTE = f"{FULL} the processors of this machine, not the wire, set the time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """A titled table; the first column holds words, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The table as Markdown, under a heading."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"{note}\n" for note in self.notes)])


def as_megabytes(count: float) -> str:
    """
    >>> as_megabytes(7_548_206), as_megabytes(81_673), as_megabytes(527)
    ('7.55', '0.0817', '0')
    """
    return f"{count / 1e6:.3g}" if count >= 1e3 else "0"


def without_numbers(system: str, reason: str, columns: Sequence[str]) -> tuple[str, ...]:
    """The row of a system that has none: the beginning of the reason; the notes have all of it."""
    return (system, reason.partition(":")[0], *["-"] * (len(columns) - 2))


def rows_of(records: Iterable[StepTimed], systems: Sequence[str]) -> list[Timing]:
    """One row for every system in every cell that was begun: cells as they came, systems in this order."""
    found = timings(record for record in records if record.system in systems)
    cells = list(dict.fromkeys(row.cell for row in found))
    return sorted(found, key=lambda row: (cells.index(row.cell), systems.index(row.system)))


def texts(row: Timing) -> tuple[str, ...]:
    """A row's text for each of `COLUMNS`."""
    if row.step_s is None or row.processor_s is None:
        return without_numbers(row.system, row.unavailable or "not measured", COLUMNS)
    return (
        row.system + (FULL if row.processor_full else ""),
        row.step_s.show(3),
        row.step_s.show_quartiles(3),
        "-" if row.efficiency is None else f"{100 * row.efficiency.median:.0f} %",
        "-" if row.speed_up is None else row.speed_up.show(2),
        "-" if row.sent_bytes is None else as_megabytes(row.sent_bytes.median),
        "-" if row.messages is None else row.messages.show(0),
        "-" if row.exposed_s is None else row.exposed_s.show(3),
        row.processor_s.show(3),
    )


def tables_of(rows: Sequence[Timing]) -> list[Table]:
    """One table per cell."""
    tables = []
    for cell in dict.fromkeys(row.cell for row in rows):
        own = [row for row in rows if row.cell == cell]
        turns = count(max(row.turns for row in own), "turn")
        notes = [f"medians of {turns}; speed as a multiple of {BASELINE}'s"]
        notes += [FULL_NOTE] if any(row.processor_full for row in own) else []
        notes += [f"{row.system}: {row.unavailable}" for row in own if row.unavailable is not None]
        shown = tuple(texts(row) for row in own)
        tables.append(Table(title=title_of(cell), columns=COLUMNS, rows=shown, notes=tuple(notes)))
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
