"""Strategies with local steps against the ceiling, and against other systems with local steps.

    python -m benchmarks.local_lab                                  all cells, 35 minutes on 2 quiet cores
    python -m benchmarks.local_lab --cells 8x20mbit,8x50mbit        some of them
    python -m benchmarks.local_lab --cells 4x1gbit --systems trickle --trial      a minute, to see it work
    python -m benchmarks.local_lab --cells 8x1gbit --stretch 2      twice the compute and half the rate

Emulated accelerators of 0.3 s per step with 5 M parameters. Cells are WORKERSxRATE: 4 or 8 hosts of the lab
with 20, 50 or 200 Mbit/s or 1 Gbit/s. Systems are warmed up and timed by turns in the same processes, by the
harness of `thinwire bench`, over whole intervals. Efficiency is the speed of workers that send nothing over
that of the system, in the same turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.common import note, parser_of, print_head, print_row, result_file, time_grid
from thinwire.bench.config import REFERENCE_NET, BenchConfig
from thinwire.bench.tables import FULL_NOTE, step_rows, step_texts, title_of
from thinwire.events import StepTimed
from thinwire.hosts.quantities import parse_rate
from thinwire.timings import BASELINE, CEILING, GridCell, Timing

TRICKLE, DILOCO, SASGD = "trickle", "diloco:fragments=5:delay=5", "sasgd:interval=auto"
HIERARCHICAL = "hierarchical-averaging:groups=2:inner_interval=8:interval=32"
OURS = (TRICKLE, DILOCO, SASGD, HIERARCHICAL)
RIVALS = ("torchft-diloco", "torchft-local-sgd", "post-local-sgd", "accelerate-local-sgd", BASELINE)
RATES = ("20mbit", "50mbit", "200mbit", "1gbit")
CELLS = tuple(f"{workers}x{rate}" for workers, rate in product((4, 8), RATES))


def goal(system: str, rate_bits_per_s: float) -> float | None:
    """The least efficiency."""
    if system == TRICKLE:
        return 0.97
    if system == DILOCO and rate_bits_per_s >= 50e6:
        return 0.97
    return 0.93 if system == SASGD and rate_bits_per_s >= 1e9 else None


LEAST_RATE = {SASGD: 1e9, HIERARCHICAL: 200e6}
"""Rates from which on these are timed: below, their intervals take minutes."""


def systems_of(asked: Sequence[str], rate_bits_per_s: float) -> list[str]:
    """The systems that are timed at a rate; DDP always."""
    names = dict.fromkeys((*asked, BASELINE))
    return [name for name in names if rate_bits_per_s >= LEAST_RATE.get(name, 0.0)]


def stretched(net: str, times: float) -> str:
    """A net that takes so many times as long.

    >>> stretched("params=5e6,forward=0.1,backward=0.2", 2)
    'params=5e6,forward=0.2,backward=0.4'
    """
    pairs = (part.split("=") for part in net.split(","))
    return ",".join(
        f"{k}={float(v) * times:g}" if k in ("forward", "backward") else f"{k}={v}" for k, v in pairs
    )


def measure_cell(
    name: str, asked: Sequence[str], *, turns: int, block_s: float, stretch: float
) -> dict[str, Any]:
    """Time all systems of a cell by turns, print a table, and return rows and raw blocks."""
    workers, _, rate = name.partition("x")
    bits_per_s = parse_rate(rate)
    systems = systems_of(asked, bits_per_s)
    net = REFERENCE_NET if stretch == 1 else stretched(REFERENCE_NET, stretch)
    config = BenchConfig(
        workers=(int(workers),),
        rates_bits_per_s=(bits_per_s / stretch,),
        nets=(net,),
        rivals="benchmarks.rivals",
        turns=turns,
        minutes=60,
        block_s=block_s,
        studies=(),
    )
    records = time_grid(config, systems)
    rows = [row for row in step_rows(records, (CEILING, *systems)) if row.step_s is not None]
    _print_table(GridCell(int(workers), bits_per_s, REFERENCE_NET), rows, records, stretch)
    return {"rows": [asdict(row) for row in rows], "blocks": [asdict(record) for record in records]}


def _print_table(
    place: GridCell, rows: Sequence[Timing], records: Sequence[StepTimed], stretch: float
) -> None:
    slowed = "" if stretch == 1 else f", compute and wire {stretch:g} times as slow"
    print(f"\n### {title_of(place)}{slowed}\n")
    print_head(
        "system", "step, s", "quartiles", "efficiency", "exposed, s", "MB per step", "processor, s", "goal"
    )
    for row in rows:
        assert row.step_s is not None
        assert row.processor_s is not None
        assert place.rate_bits_per_s is not None
        least = goal(row.system, place.rate_bits_per_s)
        efficiency = None if row.efficiency is None else row.efficiency.median
        sent = [r.sent_bytes for r in records if r.system == row.system and r.sent_bytes is not None]
        print_row(
            step_texts(row)[0],
            f"{row.step_s.median:.3f}",
            row.step_s.show_quartiles(3),
            "-" if efficiency is None else f"{100 * efficiency:.1f} %",
            "-" if row.exposed_s is None else f"{row.exposed_s.median:.3f}",
            f"{sum(sent) / len(sent) / 1e6:.3f}" if sent else "-",
            f"{row.processor_s.median:.3f}",
            "-" if least is None or efficiency is None else _verdict(efficiency, least),
        )
    for record in {r.system: r for r in records if r.unavailable is not None}.values():
        print(f"\n{record.system}: {record.unavailable}")
    if any(row.processor_full for row in rows):
        print(f"\n{FULL_NOTE}", flush=True)


def _verdict(efficiency: float, least: float) -> str:
    return f"{100 * least:.0f} %: {'yes' if efficiency >= least else 'no'}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--cells", default=",".join(CELLS), help=f"comma-separated, of {', '.join(CELLS)} (all)"
    )
    parser.add_argument("--systems", default=",".join((*OURS, *RIVALS)), help="comma-separated (all)")
    parser.add_argument("--turns", type=int, default=3, help="blocks of each system (3)")
    parser.add_argument("--block", type=float, default=2.4, help="timed seconds of a block at least (2.4)")
    parser.add_argument("--stretch", type=float, default=1.0, help="compute and wire so much slower (1)")
    parser.add_argument("--trial", action="store_true", help="not a result: save it below runs/")
    arguments = parser.parse_args()
    file = result_file("local_lab", trial=arguments.trial)
    print("## benchmarks/local_lab.py\n\nMedians over turns; 5 M parameters, 0.3 s of compute.")
    found: dict[str, Any] = {}
    for name in arguments.cells.split(","):
        systems = arguments.systems.split(",")
        given = {"turns": arguments.turns, "block_s": arguments.block, "stretch": arguments.stretch}
        found[name] = measure_cell(name, systems, **given)
        # After each cell, since a time limit may end the run.
        file.save({"config": vars(arguments), "cells": found})
    note(f"\nsaved {file.path}")


if __name__ == "__main__":
    main()
