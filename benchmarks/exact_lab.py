"""AllReduce against DDP at its best number of buckets, and sparse strategies and gossip against the ceiling.

    python -m benchmarks.exact_lab                               all cells, about 16 minutes on 2 quiet cores
    python -m benchmarks.exact_lab --cells exact-4 --turns 5     3 minutes; sparse-8 --turns 3: 4 minutes
    python -m benchmarks.exact_lab --cells exact-2 --turns 1 --trial      half a minute, to see that it works

Emulated accelerators of 0.3 s per step on hosts of the lab with 200 Mbit/s: `exact-P` has 1.25 M parameters
and P hosts, `sparse-8` has 5 M parameters and 8 hosts. Systems are warmed up and timed by turns in the same
processes, by the harness of `thinwire bench`; ratios are taken within a turn. DDP's best is the one with the
shortest median step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.common import note, parser_of, print_head, print_row, result_file, time_grid
from benchmarks.exact_systems import BUCKET_COUNTS
from thinwire.bench.config import REFERENCE_NET, SMALL_NET, BenchConfig
from thinwire.bench.tables import FULL_NOTE, step_rows, step_texts, title_of
from thinwire.events import StepTimed
from thinwire.timings import BASELINE, CEILING, GridCell, Spread, Timing, speed_ratio

RATE_BITS_PER_S = 200e6
BACKWARD, FORWARD = "all-reduce:overlap=backward", "all-reduce:overlap=forward"
DDP = tuple(f"{BASELINE}-{count}-buckets" for count in BUCKET_COUNTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabCell:
    """Hosts, rates and a net, and the systems that are compared there."""

    workers: int
    net: str
    systems: tuple[str, ...]
    rates_bits_per_s: tuple[float, ...] = (RATE_BITS_PER_S,)
    loopback: bool = False
    speed_goals: Mapping[str, float] = field(default_factory=dict)
    """Least speed as a multiple of DDP's best, by system."""
    efficiency_goals: Mapping[str, float] = field(default_factory=dict)
    """Least efficiency, by system."""


def _exact(workers: int) -> LabCell:
    goals = {BACKWARD: 1.0} | ({FORWARD: 1.25} if workers == 4 else {})
    return LabCell(workers=workers, net=SMALL_NET, systems=(*DDP, BACKWARD, FORWARD), speed_goals=goals)


CELLS = {f"exact-{workers}": _exact(workers) for workers in (2, 4, 8)} | {
    "sparse-8": LabCell(
        workers=8,
        net=REFERENCE_NET,
        systems=(*DDP, "gtopk", "oktopk", "topk", "gossip-grad:share=auto"),
        efficiency_goals={"gtopk": 0.9, "oktopk": 0.85, "gossip-grad:share=auto": 0.97},
    )
}


def measure_cell(cell: LabCell, *, turns: int, block_s: float) -> dict[str, Any]:
    """Time all systems of a cell by turns, print a table per rate, and return rows and raw blocks."""
    config = BenchConfig(
        workers=(cell.workers,),
        rates_bits_per_s=cell.rates_bits_per_s,
        nets=(cell.net,),
        rivals="benchmarks.exact_systems",
        turns=turns,
        minutes=60,
        block_s=block_s,
        studies=(),
    )
    records = time_grid(config, cell.systems, loopback=cell.loopback)
    tables = []
    for place in dict.fromkeys(GridCell(r.workers, r.rate_bits_per_s, r.net) for r in records):
        here = [r for r in records if r.rate_bits_per_s == place.rate_bits_per_s]
        tables.append(_print_table(cell, place, here))
    return {"cell": asdict(cell), "tables": tables, "blocks": [asdict(record) for record in records]}


def _print_table(cell: LabCell, place: GridCell, records: Sequence[StepTimed]) -> dict[str, Any]:
    rows = [row for row in step_rows(records, (CEILING, *cell.systems)) if row.step_s is not None]
    best = best_ddp(rows)
    print(f"\n### {title_of(place)}\n")
    print_head(
        "system", "step, s", "quartiles", f"{best} = 1", "efficiency", "exposed, s", "processor, s", "goal"
    )
    speeds: dict[str, Spread | None] = {}
    best_records = [record for record in records if record.system == best]
    for row in rows:
        speeds[row.system] = speed = speed_ratio(
            best_records, [record for record in records if record.system == row.system]
        )
        assert row.step_s is not None
        assert row.processor_s is not None
        print_row(
            step_texts(row)[0],
            f"{row.step_s.median:.3f}",
            row.step_s.show_quartiles(3),
            "-" if speed is None else f"{speed.median:.3f}",
            "-" if row.efficiency is None else f"{100 * row.efficiency.median:.1f} %",
            "-" if row.exposed_s is None else f"{row.exposed_s.median:.3f}",
            f"{row.processor_s.median:.3f}",
            _goal(cell, row, speed),
        )
    if any(row.processor_full for row in rows):
        print(f"\n{FULL_NOTE}", flush=True)
    return {
        "rate_bits_per_s": place.rate_bits_per_s,
        "best_ddp": best,
        "rows": [asdict(row) for row in rows],
        "speed_over_best_ddp": {name: speed and asdict(speed) for name, speed in speeds.items()},
    }


def best_ddp(rows: Sequence[Timing]) -> str:
    """The variant of DDP with the shortest median step."""
    variants = [row for row in rows if row.system.startswith(BASELINE)]
    return min(variants, key=lambda row: row.step_s.median if row.step_s else float("inf")).system


def _goal(cell: LabCell, row: Timing, speed: Spread | None) -> str:
    if (least := cell.speed_goals.get(row.system)) is not None and speed is not None:
        return f"{least:.2f}x: {'yes' if speed.median >= least else 'no'}"
    if (least := cell.efficiency_goals.get(row.system)) is not None and row.efficiency is not None:
        return f"{100 * least:.0f} %: {'yes' if row.efficiency.median >= least else 'no'}"
    return "-"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cells", nargs="+", choices=tuple(CELLS), default=tuple(CELLS), help="which (all)")
    parser.add_argument("--turns", type=int, default=5, help="blocks of each system (5)")
    parser.add_argument("--block", type=float, default=3.0, help="timed seconds of a block (3)")
    parser.add_argument("--trial", action="store_true", help="not a result: save it below runs/")
    arguments = parser.parse_args()
    file = result_file("exact_lab", trial=arguments.trial)
    print("## benchmarks/exact_lab.py\n\nMedians over turns.")
    found: dict[str, Any] = {}
    for name in arguments.cells:
        found[name] = measure_cell(CELLS[name], turns=arguments.turns, block_s=arguments.block)
        # After each cell, since a time limit may end the run.
        file.save({"config": vars(arguments), "cells": found})
    note(f"\nsaved {file.path}")


if __name__ == "__main__":
    main()
