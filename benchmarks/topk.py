"""TopK, GTopK and OkTopK beside DDP on the nets of the gTop-k paper, at 1 Gbit/s.

    python -m benchmarks.topk            about 30 minutes on 2 quiet cores
    python -m benchmarks.topk --quick    about 2 minutes; shows that it works, not a result
    python -m benchmarks.topk --nets vgg16 resnet50 --workers 32

Accelerators are emulated, with the seconds of the paper's; bytes are real (`thinwire bench`'s own measurement).
Two cores cannot hold 32 such workers, so a cell is emulated at a scale: net and rate shrink together, and
where the processors would still be the limit, time is stretched: all seconds grow and the rate shrinks by the
same factor. The table is in seconds of the real net. How that distorts: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance, save
from benchmarks.topk_expect import (
    RATE_BITS_PER_S,
    alpha_beta_s,
    clock_step_s,
    measured_alpha_s,
    paper_efficiency,
)
from benchmarks.topk_systems import DENSITY, STRATEGIES
from thinwire.bench.config import BenchConfig
from thinwire.bench.run import measure, prepare
from thinwire.bench.step_table import FULL, FULL_NOTE, Row, rows_of
from thinwire.bench.systems import BASELINE, CEILING
from thinwire.events import Event, StepTimed, read_events
from thinwire.hosts.rates import format_rate
from thinwire.lab.nets import Net, known_net, parse_net

SYSTEMS = (CEILING, *STRATEGIES, BASELINE)
MOST = 1.25
"""Goal: a step takes at most so many times the larger of compute and alpha-beta time."""
NOT_SLOWER = 1.02
"""Goal: of TopK's step, from 8 workers and k = 10,000 on; 2 % are within the spread of turns."""
LEAST = {("resnet50", 32): 0.9, ("vgg16", 32): 0.9}
"""Goal: efficiency of the better of GTopK and OkTopK."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """How a net is emulated."""

    scale: float
    """Of net and rate."""
    worker_s: float
    """Seconds of a step for each worker there is, so that two cores are less than half busy with all of them."""


PARTS: Mapping[str, Part] = {
    "vgg16": Part(scale=1 / 8, worker_s=0.05),
    "resnet50": Part(scale=1 / 8, worker_s=0.1),
    "alexnet": Part(scale=1 / 32, worker_s=0.035),
    "resnet20": Part(scale=1.0, worker_s=0.025),
    "lstm-ptb": Part(scale=1 / 32, worker_s=0.035),
}
SHORTENED_S = 0.5
"""A step that is longer by itself need not be longer than this, or than its workers need."""
TURNS = {4: 3, 8: 3, 16: 2, 32: 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One net and number of workers, and how it is emulated."""

    net: Net
    """At full size, with its own seconds."""
    workers: int
    scale: float
    stretch: float
    """Emulated seconds for one of the net's own."""

    @staticmethod
    def of(name: str, workers: int) -> Cell:
        net, part = known_net(name), PARTS[name]
        own_s = net.forward_s + net.backward_s
        step_s = max(workers * part.worker_s, min(own_s, SHORTENED_S))
        batch = round(net.batch * step_s / own_s)
        return Cell(net=net, workers=workers, scale=part.scale, stretch=batch / net.batch)

    @property
    def spec(self) -> str:
        """As the bench takes it: seconds are in proportion to the batch."""
        return f"{self.net.name},batch={round(self.net.batch * self.stretch)}"

    @property
    def rate_bits_per_s(self) -> float:
        """As the bench takes it: it applies the scale itself."""
        return RATE_BITS_PER_S / self.stretch

    @property
    def compute_s(self) -> float:
        return self.net.forward_s + self.net.backward_s

    @property
    def k(self) -> float:
        return DENSITY * self.net.num_params

    def shown(self) -> str:
        rate = format_rate(self.rate_bits_per_s * self.scale)
        return f"1/{1 / self.scale:g}, {self.stretch:.3g} ({rate})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One system in one cell; seconds are those of the real net."""

    net: str
    workers: int
    system: str
    scale: float
    stretch: float
    step_s: float
    efficiency: float
    paper: float | None
    clock: float
    """Efficiency on the virtual clock, at full size and with the paper's start-up."""
    alpha_beta_s: float
    ratio: float
    """Step over the larger of compute and alpha-beta time."""
    against_topk: float
    """Step over TopK's."""
    processor_s: float
    """Emulated ones, as the machine felt them."""
    processor_full: bool
    sent_bytes: float
    messages: float | None

    @staticmethod
    def of(row: Row, rows: Sequence[Row], cell: Cell, alpha_s: float) -> Measured:
        assert row.step_s is not None
        assert row.processor_s is not None
        assert row.efficiency is not None
        steps = {each.system: each.step_s.median for each in rows if each.step_s is not None}
        step_s = row.step_s.median / cell.stretch
        small = parse_net(cell.spec, scale=cell.scale)
        rate = cell.rate_bits_per_s * cell.scale
        silent = row.system == CEILING
        wire_s = (
            0.0 if silent else alpha_beta_s(row.system, small, cell.workers, alpha_s=alpha_s, bits_per_s=rate)
        )
        return Measured(
            net=cell.net.name,
            workers=cell.workers,
            system=row.system,
            scale=cell.scale,
            stretch=cell.stretch,
            step_s=step_s,
            efficiency=row.efficiency.median,
            paper=None if silent else paper_efficiency(cell.net.name, row.system, cell.workers),
            clock=1.0 if silent else cell.compute_s / clock_step_s(row.system, cell.net, cell.workers),
            alpha_beta_s=wire_s / cell.stretch,
            ratio=step_s / max(cell.compute_s, wire_s / cell.stretch),
            against_topk=row.step_s.median / steps["topk"],
            processor_s=row.processor_s.median,
            processor_full=row.processor_full,
            sent_bytes=0.0 if row.sent_bytes is None else row.sent_bytes.median,
            messages=None if row.messages is None else row.messages.median,
        )

    def cells(self, cell: Cell) -> list[str]:
        """As `COLUMNS` have it."""
        return [
            self.net,
            str(self.workers),
            cell.shown(),
            self.system + (FULL if self.processor_full else ""),
            f"{self.step_s:.4g}",
            f"{100 * self.efficiency:.1f} %",
            "-" if self.paper is None else f"{100 * self.paper:.1f} %",
            f"{100 * self.clock:.1f} %",
            f"{self.alpha_beta_s:.4f}",
            f"{self.ratio:.2f}",
            f"{self.against_topk:.2f}",
            f"{self.processor_s:.3f}",
        ]


COLUMNS = (
    *("net", "workers", "scale, seconds x (rate)", "system", "step, s", "efficiency", "paper", "clock"),
    *("alpha-beta, s", f"ratio (goal {MOST:g})", "topk = 1", "processor, s"),
)


def measure_cell(cell: Cell, *, turns: int, block_s: float) -> tuple[list[Row], list[StepTimed]]:
    """All systems by turns, in a lab of its own."""
    config = BenchConfig(
        workers=(cell.workers,),
        rates_bits_per_s=(cell.rate_bits_per_s,),
        nets=(cell.spec,),
        rivals="benchmarks.topk_systems",
        scale=cell.scale,
        turns=turns,
        minutes=60,
        block_s=block_s,
        studies=(),
    )
    setting = prepare(config, [*STRATEGIES, BASELINE])
    if setting.no_lab is not None:
        raise SystemExit(f"rates cannot be set here: {setting.no_lab}")
    with tempfile.TemporaryDirectory() as scratch:
        measure(Path(scratch), setting, _watch, lambda what, left_s: None)
        records = [e.record for e in read_events(Path(scratch)) if isinstance(e.record, StepTimed)]
    return rows_of(records, SYSTEMS), records


# -- goals ----------------------------------------------------------------------------------------------


def verdicts(found: Sequence[Measured]) -> list[str]:
    """What was to be shown, and whether it was."""
    sparse = [each for each in found if each.system in STRATEGIES]
    slow = [each for each in sparse if each.ratio > MOST]
    beside = [
        each
        for each in sparse
        if each.system != "topk" and each.workers >= 8 and DENSITY * known_net(each.net).num_params >= 10_000
    ]
    slower = [each for each in beside if each.against_topk > NOT_SLOWER]
    lines = [
        f"- a step takes at most {MOST:g} times the larger of compute and alpha-beta time: "
        f"{len(sparse) - len(slow)} of {len(sparse)}{_named(slow)}",
        f"- not slower than topk with k >= 10,000 and 8 workers or more: {len(beside) - len(slower)} of "
        f"{len(beside)}{_named(slower)}",
    ]
    for net, workers in dict.fromkeys((each.net, each.workers) for each in found):
        own = [each for each in sparse if (each.net, each.workers) == (net, workers)]
        best = max((each for each in own if each.system != "topk"), key=lambda each: each.efficiency)
        goal = LEAST.get((net, workers))
        reached = (
            ""
            if goal is None
            else f" (goal {100 * goal:.0f} %: {'yes' if best.efficiency >= goal else 'no'})"
        )
        lines.append(f"- {net}, {workers} workers: {best.system} with {100 * best.efficiency:.1f} %{reached}")
    return lines


def _named(some: Sequence[Measured]) -> str:
    names = [f"{each.system} {each.net} {each.workers}{FULL if each.processor_full else ''}" for each in some]
    return f"; not: {', '.join(names)}" if names else ""


# -- the command ----------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.topk", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="two small cells, to see that it works")
    parser.add_argument("--nets", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="which (all)")
    parser.add_argument("--workers", type=int, nargs="+", choices=tuple(TURNS), default=list(TURNS))
    parser.add_argument(
        "--turns", type=int, help="times each system has its turn (4, 8 workers: 3; 16: 2; 32: 1)"
    )
    parser.add_argument("--block", type=float, default=4.0, help="seconds that a turn is timed (default: 4)")
    return parser.parse_args()


def main() -> None:
    """Measure, print, keep."""
    arguments = parse()
    if arguments.quick:
        arguments.nets, arguments.workers, arguments.turns = ["resnet20", "alexnet"], [4], 1
    begin, found, raw = provenance(), list[Measured](), list[dict[str, Any]]()
    alpha_s = measured_alpha_s()
    print("## benchmarks/topk.py" + (" (quick: not a result)" if arguments.quick else ""))
    print(f"\nStart-up of a message between two idle hosts of the lab: {1e3 * alpha_s:.2f} ms\n")
    print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS), flush=True)
    for workers in arguments.workers:
        for name in arguments.nets:
            cell, began_s = Cell.of(name, workers), time.monotonic()
            turns = arguments.turns or TURNS[workers]
            _note(f"{name}, {workers} workers, {cell.shown()} ...")
            rows, records = measure_cell(cell, turns=turns, block_s=arguments.block)
            own = [Measured.of(row, rows, cell, alpha_s) for row in rows if row.step_s is not None]
            for each in own:
                print("| " + " | ".join(each.cells(cell)) + " |", flush=True)
            found += own
            raw += [asdict(record) for record in records]
            _note(f"  took {time.monotonic() - began_s:.0f} s")
    print("\n".join(["", FULL_NOTE, "", "### Goals", "", *verdicts(found)]))
    result = {
        "begin": begin,
        "config": {**vars(arguments), "parts": {name: asdict(part) for name, part in PARTS.items()}},
        "alpha_s": alpha_s,
        "cells": [asdict(each) for each in found],
        "records": raw,
        "end": provenance(),
    }
    _note(f"\nsaved {save('topk', result, trial=arguments.quick)}")


def _watch(folder: Path, event: Event) -> None:
    if isinstance(event.record, StepTimed):
        timed = event.record
        _note(f"  turn {timed.turn + 1}: {timed.system}: {timed.unavailable or f'{timed.step_s:.3f} s'}")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
