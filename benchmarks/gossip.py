"""GossipGraD: does training keep its full speed on any wire, and beside a slow worker?

    python -m benchmarks.gossip            about 25 minutes on 2 quiet cores
    python -m benchmarks.gossip --quick    about 2 minutes; shows that it works, not a result

Part 1, wire: share="auto" against the ceiling and DDP, by `thinwire bench`'s own measurement, on an emulated
accelerator with 5 M parameters and 0.3 s per step. Part 2, straggler: see gossip_straggler.py. The cost of
gossip in accuracy is measured by fidelity.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import gossip_straggler
from benchmarks.common import note, parser_of, print_head, print_row, result_file, time_grid
from benchmarks.gossip_straggler import StragglerConfig
from thinwire.bench.config import STANDARD, BenchConfig
from thinwire.bench.tables import FULL_NOTE, step_rows
from thinwire.events import StepTimed
from thinwire.hosts.quantities import format_rate
from thinwire.timings import BASELINE, CEILING, Timing

AUTO = "gossip-grad:share=auto"
SYSTEMS = (CEILING, AUTO, BASELINE)
NET = "params=5e6,layers=16,forward={forward:g},backward={backward:g}"
GOALS = {1e9: 0.97, 200e6: 0.97, 50e6: 0.95}
"""Least efficiency by rate, in bit per second."""
LEAST_USE = 0.7
"""Least share of the wire in use, where not the whole model is sent."""
SCALES = {4: 0.5, 8: 0.25, 16: 0.125}
"""By number of workers: at full size two cores, not the wire, would be the limit. Net and rate shrink
together; seconds stay."""
STRETCHES = {16: 2.0}
"""By number of workers: all of them step at the same moment, one after another on two cores. With compute and
wire this many times slower, the processors' work weighs as many times less."""
CONFIG = replace(
    STANDARD,
    rates_bits_per_s=tuple(GOALS),
    nets=(NET.format(forward=0.1, backward=0.2),),
    block_s=5.0,
    minutes=60,
    studies=(),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WireRow:
    """One system in one cell."""

    row: Timing
    scale: float
    stretch: float
    use: float | None
    """Bytes sent over the bytes that the wire could have carried in the time of a step."""
    instruments: dict[str, float]
    """Medians over turns."""

    @staticmethod
    def of(row: Timing, records: Sequence[StepTimed], scale: float, stretch: float) -> WireRow:
        own = [r for r in records if r.system == row.system and r.rate_bits_per_s == row.rate_bits_per_s]
        uses = [
            8 * sent / (r.rate_bits_per_s * scale * r.step_s)
            for r in own
            if (sent := r.metered_bytes or r.sent_bytes) and r.rate_bits_per_s and r.step_s
        ]
        told = {name: statistics.median(r.instruments[name] for r in own) for name in own[0].instruments}
        use = statistics.median(uses) if uses else None
        return WireRow(row=row, scale=scale, stretch=stretch, use=use, instruments=told)

    @property
    def rate_bits_per_s(self) -> float:
        """The rate if nothing were scaled or stretched."""
        return (self.row.rate_bits_per_s or 0.0) * self.stretch

    @property
    def goal(self) -> str:
        """The goal, and whether it is reached."""
        if self.row.system != AUTO or self.row.efficiency is None or self.use is None:
            return "-"
        least = GOALS[self.rate_bits_per_s]
        fast = self.row.efficiency.median >= least
        talks = self.instruments["share"] == 1 or self.use >= LEAST_USE
        return f"{100 * least:.0f} %: {'yes' if fast and talks else 'no'}"

    def cells(self) -> list[str]:
        """The row's text for each of `COLUMNS`."""
        row, told = self.row, self.instruments
        if row.step_s is None or row.processor_s is None:
            return [str(row.workers), row.system, row.unavailable or "not measured"]
        rate = format_rate(self.rate_bits_per_s) + ("" if self.scale == 1 else f" x {self.scale:g}")
        rate += "" if self.stretch == 1 else f", {self.stretch:g} times slower"
        picked = f"{told['share']:.3g} in {told['payload_bits']:.0f} bits" if "share" in told else "-"
        return [
            str(row.workers),
            rate,
            row.system + ("*" if row.processor_full else ""),
            f"{row.step_s.median:.3f}",
            "-" if row.efficiency is None else f"{100 * row.efficiency.median:.1f} %",
            "-" if self.use is None else f"{100 * self.use:.0f} %",
            picked,
            "-" if row.exposed_s is None else f"{row.exposed_s.median:.3f}",
            f"{row.processor_s.median:.3f}",
            self.goal,
        ]


COLUMNS = (
    *("workers", "rate", "system", "step, s", "efficiency", "wire used", "sends", "exposed, s"),
    *("processor, s", "goal"),
)


def measure_wire(
    config: BenchConfig, world_sizes: Sequence[int], scale: float | None
) -> list[dict[str, Any]]:
    """Print a row per system and cell, and return the rows."""
    print("\n### Wire\n")
    print_head(*COLUMNS)
    found: list[WireRow] = []
    for world_size in world_sizes:
        own_scale, stretch = scale or SCALES.get(world_size, 1.0), STRETCHES.get(world_size, 1.0)
        stretched = replace(
            config,
            workers=(world_size,),
            scale=own_scale,
            rates_bits_per_s=tuple(rate / stretch for rate in config.rates_bits_per_s),
            block_s=config.block_s * stretch,
            nets=(NET.format(forward=0.1 * stretch, backward=0.2 * stretch),),
        )
        records = time_grid(stretched, [AUTO, BASELINE])
        rows = [WireRow.of(row, records, own_scale, stretch) for row in step_rows(records, SYSTEMS)]
        for row in rows:
            print_row(*row.cells())
        found += rows
    print("\n".join(["", FULL_NOTE, *scaling(found)]))
    return [asdict(each) for each in found]


def scaling(found: Sequence[WireRow]) -> list[str]:
    """The efficiency of the most workers against that of the fewest, by rate."""
    lines = []
    for rate in GOALS:
        rows = [m.row for m in found if m.row.system == AUTO and m.rate_bits_per_s == rate]
        own = {row.workers: row.efficiency.median for row in rows if row.efficiency is not None}
        if len(own) > 1:
            ratio = own[max(own)] / own[min(own)]
            lines.append(
                f"{format_rate(rate)}: {max(own)} workers have {100 * ratio:.1f} % of the efficiency of "
                f"{min(own)} (goal: 97 %)"
            )
    return lines


def main() -> None:
    parser = parser_of(__doc__)
    parts = ("wire", "straggler")
    parser.add_argument("--quick", action="store_true", help="one small cell each, to see that it works")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="which (default: all)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16], help="world sizes")
    parser.add_argument("--turns", type=int, default=3, help="blocks of each system (default: 3)")
    parser.add_argument("--scale", type=float, help="shrinks net and rate (2 over the workers)")
    arguments = parser.parse_args()
    config, world_sizes = replace(CONFIG, turns=arguments.turns), arguments.workers
    straggler = StragglerConfig(turns=arguments.turns)
    if arguments.quick:
        config = replace(config, turns=1, rates_bits_per_s=(200e6,), block_s=2.0)
        straggler, world_sizes = StragglerConfig(turns=1, steps=8), [2]
    file, result = result_file("gossip", trial=arguments.quick), dict[str, Any]()
    print("## benchmarks/gossip.py" + (" (quick: not a result)" if arguments.quick else ""))
    if "wire" in arguments.parts:
        cells = measure_wire(config, world_sizes, arguments.scale)
        result["wire"] = {"config": asdict(config), "cells": cells}
    if "straggler" in arguments.parts:
        result["straggler"] = gossip_straggler.measure(straggler)
    note(f"\nsaved {file.save(result)}")


if __name__ == "__main__":
    main()
