"""GossipGraD: does training keep its full speed on any wire, and beside a slow worker?

    python -m benchmarks.gossip            about 25 minutes on 2 quiet cores
    python -m benchmarks.gossip --quick    about 2 minutes; shows that it works, not a result

Part 1, wire: share="auto" against the ceiling and DDP, by `thinwire bench`'s own measurement, on an emulated
accelerator with 5 M parameters and 0.3 s per step. Part 2, straggler: see gossip_straggler.py. What gossip
costs in accuracy is measured by fidelity.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import gossip_straggler
from benchmarks.provenance import provenance, save
from thinwire.bench.config import STANDARD, BenchConfig
from thinwire.bench.run import measure, prepare
from thinwire.bench.step_table import Row, rows_of
from thinwire.bench.systems import BASELINE, CEILING
from thinwire.events import Event, StepTimed, read_events
from thinwire.hosts.rates import format_rate

AUTO = "gossip-grad:share=auto"
NET = "params=5e6,layers=16,forward={forward:g},backward={backward:g}"
GOALS = {1e9: 0.97, 200e6: 0.97, 50e6: 0.95}
"""Least efficiency by rate, in bit per second."""
LEAST_USE = 0.7
"""Of the wire, where not the whole model is sent."""
SCALES = {4: 0.5, 8: 0.25, 16: 0.125}
"""By number of workers: with so many of them, two cores would be the limit, not the wire. Net and rate shrink
together; seconds stay."""
STRETCHES = {16: 2.0}
"""By number of workers: all of them land, step and launch at the same moment, one after another on two cores.
So compute and wire are this many times slower, and what the processors do counts for as much less."""
CONFIG = replace(
    STANDARD,
    rates_bits_per_s=tuple(GOALS),
    nets=(NET.format(forward=0.1, backward=0.2),),
    block_s=5.0,
    minutes=60,
    studies=(),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One system in one cell."""

    row: Row
    scale: float
    stretch: float
    use: float | None
    """Bytes sent over what the wire could have carried in the time of a step."""
    instruments: dict[str, float]
    """Medians over turns."""

    @staticmethod
    def of(row: Row, records: Sequence[StepTimed], scale: float, stretch: float) -> Measured:
        own = [r for r in records if r.system == row.system and r.rate_bits_per_s == row.rate_bits_per_s]
        uses = [
            8 * sent / (r.rate_bits_per_s * scale * r.step_s)
            for r in own
            if (sent := r.metered_bytes or r.sent_bytes) and r.rate_bits_per_s and r.step_s
        ]
        told = {name: statistics.median(r.instruments[name] for r in own) for name in own[0].instruments}
        use = statistics.median(uses) if uses else None
        return Measured(row=row, scale=scale, stretch=stretch, use=use, instruments=told)

    @property
    def rate_bits_per_s(self) -> float:
        """As it would be if nothing were scaled or stretched."""
        return (self.row.rate_bits_per_s or 0.0) * self.stretch

    @property
    def goal(self) -> str:
        """Whether it is reached, in words."""
        if self.row.system != AUTO or self.row.efficiency is None or self.use is None:
            return "-"
        least = GOALS[self.rate_bits_per_s]
        fast = self.row.efficiency.median >= least
        talks = self.instruments["share"] == 1 or self.use >= LEAST_USE
        return f"{100 * least:.0f} %: {'yes' if fast and talks else 'no'}"

    def cells(self) -> list[str]:
        """As `COLUMNS` have it."""
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
            row.step_s.show(3),
            "-" if row.efficiency is None else f"{100 * row.efficiency.median:.1f} %",
            "-" if self.use is None else f"{100 * self.use:.0f} %",
            picked,
            "-" if row.exposed_s is None else row.exposed_s.show(3),
            row.processor_s.show(3),
            self.goal,
        ]


COLUMNS = (
    *("workers", "rate", "system", "step, s", "efficiency", "wire used", "sends", "exposed, s"),
    *("processor, s", "goal"),
)


def measure_wire(
    config: BenchConfig, world_sizes: Sequence[int], scale: float | None
) -> list[dict[str, Any]]:
    """A line per system and cell; all there is to keep."""
    print("\n### Wire\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    found: list[Measured] = []
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
        setting = prepare(stretched, [AUTO, BASELINE])
        if setting.no_lab is not None:
            raise SystemExit(f"rates cannot be set here: {setting.no_lab}")
        with tempfile.TemporaryDirectory() as scratch:
            measure(Path(scratch), setting, _watch, lambda what, left_s: _note(f"wire: {what} ..."))
            records = [e.record for e in read_events(Path(scratch)) if isinstance(e.record, StepTimed)]
        rows = rows_of(records, (CEILING, AUTO, BASELINE))
        found += [Measured.of(row, records, own_scale, stretch) for row in rows]
        for each in found[-len(rows) :]:
            print("| " + " | ".join(each.cells()) + " |", flush=True)
    print("\n".join(["", "* the processors of this machine, not the wire, set the time", *scaling(found)]))
    return [asdict(each) for each in found]


def scaling(found: Sequence[Measured]) -> list[str]:
    """How the most workers do against the fewest, by rate."""
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


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gossip", description=(__doc__ or "").split("\n")[0]
    )
    parts = ("wire", "straggler")
    parser.add_argument("--quick", action="store_true", help="one small cell each, to see that it works")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="which (default: all)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8, 16], help="world sizes")
    parser.add_argument("--turns", type=int, default=3, help="times each system has its turn (default: 3)")
    parser.add_argument("--scale", type=float, help="shrinks net and rate (2 over the workers)")
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep."""
    arguments = parse()
    config = replace(CONFIG, turns=arguments.turns)
    straggler = replace(gossip_straggler.CONFIG, turns=arguments.turns)
    world_sizes = arguments.workers
    if arguments.quick:
        config = replace(config, turns=1, rates_bits_per_s=(200e6,), block_s=2.0)
        straggler = replace(straggler, turns=1, steps=8)
        world_sizes = [2]
    result: dict[str, Any] = {"begin": provenance()}
    print("## benchmarks/gossip.py" + (" (quick: not a result)" if arguments.quick else ""))
    if "wire" in arguments.parts:
        result["wire"] = {
            "config": asdict(config),
            "cells": measure_wire(config, world_sizes, arguments.scale),
        }
    if "straggler" in arguments.parts:
        result["straggler"] = gossip_straggler.measure(straggler)
    result["end"] = provenance()
    _note(f"\nsaved {save('gossip', result, trial=arguments.quick)}")


def _watch(folder: Path, event: Event) -> None:
    if isinstance(event.record, StepTimed):
        timed = event.record
        seconds = timed.unavailable or f"{timed.step_s:.3f} s"
        rate = format_rate(timed.rate_bits_per_s or 0.0)
        _note(f"  turn {timed.turn + 1}: {timed.workers} workers, {rate}, {timed.system}: {seconds}")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
