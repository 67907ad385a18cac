"""TopK, GTopK and OkTopK beside DDP on the nets of the gTop-k paper, at 1 Gbit/s.

    python -m benchmarks.topk            about 32 minutes on 2 quiet cores
    python -m benchmarks.topk --quick    about 2 minutes; shows that it works, not a result
    python -m benchmarks.topk --nets vgg16 resnet50 --workers 32

Accelerators are emulated, with the seconds of the paper's; bytes are real. It is `thinwire bench`'s own
measurement. Two cores cannot hold 32 such workers, so a cell is emulated at a scale: net and rate shrink
together, and where the processors would still be the limit, time is stretched: all seconds grow and the rate
shrinks by the same factor. The table is in seconds of the real net. What that changes: benchmarks/README.md.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from benchmarks.common import note, parser_of, print_head, print_row, result_file, time_grid
from benchmarks.topk_cells import COLUMNS, PARTS, TopKCell, TopKRow, verdicts
from benchmarks.topk_expect import measured_alpha_s
from benchmarks.topk_systems import STRATEGIES
from thinwire.bench.config import BenchConfig
from thinwire.bench.tables import FULL_NOTE, step_rows
from thinwire.events import StepTimed
from thinwire.timings import BASELINE, CEILING

SYSTEMS = (CEILING, *STRATEGIES, BASELINE)
TURNS = {4: 2, 8: 2, 16: 1, 32: 1}
"""By number of workers: more of them take longer, and the slowest of more of them varies less."""


def measure_cell(cell: TopKCell, *, turns: int, block_s: float) -> list[StepTimed]:
    """Time all systems by turns, in one lab."""
    config = BenchConfig(
        workers=(cell.workers,),
        rates_bits_per_s=(cell.rate_bits_per_s,),
        nets=(cell.spec,),
        rivals="benchmarks.topk_systems",
        scale=cell.scale,
        turns=turns,
        minutes=60,
        block_s=max(block_s, 2 * cell.compute_s * cell.stretch),
        studies=(),
    )
    return time_grid(config, [*STRATEGIES, BASELINE])


def judged(records: list[StepTimed], cell: TopKCell, alpha_s: float) -> list[TopKRow]:
    """A row per system."""
    rows = step_rows(records, SYSTEMS)
    topk_s = next(row.step_s.median for row in rows if row.system == "topk" and row.step_s is not None)
    return [TopKRow.of(row, cell, topk_s=topk_s, alpha_s=alpha_s) for row in rows if row.step_s is not None]


def main() -> None:
    parser = parser_of(__doc__)
    names, counts = tuple(PARTS), tuple(TURNS)
    parser.add_argument("--quick", action="store_true", help="two small cells, to see that it works")
    parser.add_argument("--nets", nargs="+", choices=names, default=names, help="which (default: all)")
    parser.add_argument("--workers", type=int, nargs="+", choices=counts, default=counts, help="how many")
    parser.add_argument("--turns", type=int, help="of each system (2 with 4 and 8 workers, else 1)")
    parser.add_argument("--block", type=float, default=3.0, help="seconds of a turn, at least (default: 3)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.nets, arguments.workers, arguments.turns = ["resnet20", "alexnet"], [4], 1
    file, found, raw = result_file("topk", trial=arguments.quick), list[TopKRow](), list[dict[str, Any]]()
    alpha_s = measured_alpha_s()
    print("## benchmarks/topk.py" + (" (quick: not a result)" if arguments.quick else ""))
    print(f"\nStart-up of a message between two idle hosts of the lab: {1e3 * alpha_s:.2f} ms\n")
    print_head(*COLUMNS)
    for workers in arguments.workers:
        for name in arguments.nets:
            cell, began_s = TopKCell.of(name, workers), time.monotonic()
            note(f"{name}, {workers} workers, {cell.shown()} ...")
            records = measure_cell(cell, turns=arguments.turns or TURNS[workers], block_s=arguments.block)
            own = judged(records, cell, alpha_s)
            for row in own:
                print_row(*row.cells())
            found += own
            raw += [asdict(record) for record in records]
            note(f"  took {time.monotonic() - began_s:.0f} s")
    print("\n".join(["", FULL_NOTE, "", "### Goals", "", *verdicts(found)]))
    result = {
        "config": {**vars(arguments), "parts": {name: asdict(part) for name, part in PARTS.items()}},
        "alpha_s": alpha_s,
        "cells": [asdict(each) for each in found],
        "records": raw,
    }
    note(f"\nsaved {file.save(result)}")


if __name__ == "__main__":
    main()
