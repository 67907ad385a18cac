"""The cells of topk.py, how each is emulated, their rows in the table, and the goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.topk_expect import RATE_BITS_PER_S, alpha_beta_s, clock_step_s, paper_efficiency
from benchmarks.topk_systems import DENSITY, STRATEGIES
from thinwire.bench.tables import FULL
from thinwire.hosts.quantities import format_rate
from thinwire.lab.nets import Net, known_net, parse_net
from thinwire.timings import CEILING, Timing

MOST = 1.25
"""Goal: longest step, relative to the larger of compute and alpha-beta time."""
NOT_SLOWER = 1.02
"""Goal: longest step relative to TopK's, from 8 workers and k = 10,000 on; 2 % are the spread of turns."""
LEAST = {("resnet50", 32): 0.9, ("vgg16", 32): 0.9}
"""Goal: least efficiency of the better of GTopK and OkTopK."""
DISTURBED = 1.05
"""Step of the ceiling, relative to compute, above which something else must have run on the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulation:
    """The scale and the least seconds at which a net is emulated."""

    scale: float
    """Scale of net and rate."""
    worker_s: float
    """Least seconds of a step, per worker: with fewer, the two cores would be the limit."""


PARTS: Mapping[str, Emulation] = {
    "vgg16": Emulation(scale=1 / 8, worker_s=0.14),
    "resnet50": Emulation(scale=1 / 8, worker_s=0.15),
    "alexnet": Emulation(scale=1 / 32, worker_s=0.1),
    "resnet20": Emulation(scale=1.0, worker_s=0.05),
    "lstm-ptb": Emulation(scale=1 / 32, worker_s=0.1),
}
SHORTENED_S = 1.0
"""Longer steps are shortened to this, or to what their workers need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKCell:
    """One net and number of workers, and how it is emulated."""

    net: Net
    """The net at full size, with its own seconds."""
    workers: int
    scale: float
    stretch: float
    """Emulated seconds for one of the net's own."""

    @staticmethod
    def of(name: str, workers: int) -> TopKCell:
        net, part = known_net(name), PARTS[name]
        own_s = net.forward_s + net.backward_s
        step_s = max(workers * part.worker_s, min(own_s, SHORTENED_S))
        batch = round(net.batch * step_s / own_s)
        return TopKCell(net=net, workers=workers, scale=part.scale, stretch=batch / net.batch)

    @property
    def spec(self) -> str:
        """The net in the grammar of the bench: seconds are in proportion to the batch."""
        return f"{self.net.name},batch={round(self.net.batch * self.stretch)}"

    @property
    def rate_bits_per_s(self) -> float:
        """The rate for the bench, which applies the scale itself."""
        return RATE_BITS_PER_S / self.stretch

    @property
    def compute_s(self) -> float:
        """Compute of the real net."""
        return self.net.forward_s + self.net.backward_s

    def emulated_wire_s(self, system: str, alpha_s: float) -> float:
        """Alpha-beta time of this system's rounds in the lab."""
        if system == CEILING:
            return 0.0
        small = parse_net(self.spec, scale=self.scale)
        rate = self.rate_bits_per_s * self.scale
        return alpha_beta_s(system, small, self.workers, alpha_s=alpha_s, bits_per_s=rate)

    def shown(self) -> str:
        """Scale, seconds and rate, for a table."""
        rate = format_rate(round(self.rate_bits_per_s * self.scale, -4))
        return f"1/{1 / self.scale:g}, {self.stretch:.3g} ({rate})"


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKRow:
    """One system in one cell; seconds are those of the real net, the processor's those of the lab."""

    net: str
    workers: int
    system: str
    emulated: str
    turns: int
    step_s: float
    efficiency: float
    paper: float | None
    """The paper's efficiency."""
    clock: float
    """Efficiency on the virtual clock, at full size and with the paper's start-up."""
    alpha_beta_s: float
    ratio: float
    """Step over the larger of compute and alpha-beta time."""
    against_topk: float
    """Step over TopK's."""
    processor_s: float
    processor_full: bool

    @staticmethod
    def of(row: Timing, cell: TopKCell, *, topk_s: float, alpha_s: float) -> TopKRow:
        assert row.step_s is not None
        assert row.processor_s is not None
        assert row.efficiency is not None
        step_s = row.step_s.median / cell.stretch
        wire_s = cell.emulated_wire_s(row.system, alpha_s) / cell.stretch
        clock_s = cell.compute_s
        paper = None
        if row.system != CEILING:
            clock_s = clock_step_s(row.system, cell.net, cell.workers)
            paper = paper_efficiency(cell.net.name, row.system, cell.workers)
        return TopKRow(
            net=cell.net.name,
            workers=cell.workers,
            system=row.system,
            emulated=cell.shown(),
            turns=row.turns,
            step_s=step_s,
            efficiency=row.efficiency.median,
            paper=paper,
            clock=cell.compute_s / clock_s,
            alpha_beta_s=wire_s,
            ratio=step_s / max(cell.compute_s, wire_s),
            against_topk=row.step_s.median / topk_s,
            processor_s=row.processor_s.median,
            processor_full=row.processor_full,
        )

    def cells(self) -> list[str]:
        """The row's text for each of `COLUMNS`."""
        return [
            self.net,
            str(self.workers),
            self.emulated,
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


def verdicts(found: Sequence[TopKRow]) -> list[str]:
    """The goals, and whether they are reached."""
    sparse = [each for each in found if each.system in STRATEGIES]
    slow = [each for each in sparse if each.ratio > MOST]
    beside = [each for each in sparse if each.system != "topk" and _compared(each)]
    slower = [each for each in beside if each.against_topk > NOT_SLOWER]
    lines = [
        f"- a step takes at most {MOST:g} times the larger of compute and alpha-beta time: "
        f"{len(sparse) - len(slow)} of {len(sparse)}{_named(slow)}",
        f"- not slower than topk with k >= 10,000 and 8 workers or more: {len(beside) - len(slower)} of "
        f"{len(beside)}{_named(slower)}",
    ]
    disturbed = [each for each in found if each.system == CEILING and each.ratio > DISTURBED]
    lines += [f"- measure again, {each.net} {each.workers}: the ceiling was disturbed" for each in disturbed]
    for net, workers in dict.fromkeys((each.net, each.workers) for each in sparse):
        own = [each for each in sparse if (each.net, each.workers) == (net, workers)]
        best = max((each for each in own if each.system != "topk"), key=lambda each: each.efficiency)
        line = f"- {net}, {workers} workers: {best.system} with {100 * best.efficiency:.1f} %"
        if (least := LEAST.get((net, workers))) is not None:
            line += f" (goal {100 * least:.0f} %: {'yes' if best.efficiency >= least else 'no'})"
        lines.append(line)
    return lines


def _compared(each: TopKRow) -> bool:
    return each.workers >= 8 and DENSITY * known_net(each.net).num_params >= 10_000


def _named(some: Sequence[TopKRow]) -> str:
    names = [f"{each.system} {each.net} {each.workers}{FULL if each.processor_full else ''}" for each in some]
    return f"; not: {', '.join(names)}" if names else ""
