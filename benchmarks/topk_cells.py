"""The cells of topk.py: how each is emulated, what was measured in it, and what was to be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.topk_expect import RATE_BITS_PER_S, alpha_beta_s, clock_step_s, paper_efficiency
from benchmarks.topk_systems import DENSITY, STRATEGIES
from thinwire.bench.step_table import FULL, Row
from thinwire.bench.systems import CEILING
from thinwire.hosts.rates import format_rate
from thinwire.lab.nets import Net, known_net, parse_net

MOST = 1.25
"""Goal: a step takes at most so many times the larger of compute and alpha-beta time."""
NOT_SLOWER = 1.02
"""Goal: of TopK's step, from 8 workers and k = 10,000 on; 2 % are within the spread of turns."""
LEAST = {("resnet50", 32): 0.9, ("vgg16", 32): 0.9}
"""Goal: efficiency of the better of GTopK and OkTopK."""
DISTURBED = 1.05
"""Where workers that send nothing take so many times their compute, something else ran on the machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """How a net is emulated."""

    scale: float
    """Of net and rate."""
    worker_s: float
    """Seconds of a step for each worker there is: with fewer, two cores would be busy with them all."""


PARTS: Mapping[str, Part] = {
    "vgg16": Part(scale=1 / 8, worker_s=0.14),
    "resnet50": Part(scale=1 / 8, worker_s=0.15),
    "alexnet": Part(scale=1 / 32, worker_s=0.1),
    "resnet20": Part(scale=1.0, worker_s=0.05),
    "lstm-ptb": Part(scale=1 / 32, worker_s=0.1),
}
SHORTENED_S = 1.0
"""A step that is longer by itself need not be longer than this, or than its workers need."""


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
        """Of the real net."""
        return self.net.forward_s + self.net.backward_s

    def emulated_wire_s(self, system: str, alpha_s: float) -> float:
        """Alpha-beta time of this system's rounds as they are in the lab."""
        if system == CEILING:
            return 0.0
        small = parse_net(self.spec, scale=self.scale)
        rate = self.rate_bits_per_s * self.scale
        return alpha_beta_s(system, small, self.workers, alpha_s=alpha_s, bits_per_s=rate)

    def shown(self) -> str:
        """In a table: scale, seconds and rate."""
        rate = format_rate(round(self.rate_bits_per_s * self.scale, -4))
        return f"1/{1 / self.scale:g}, {self.stretch:.3g} ({rate})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
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
    def of(row: Row, cell: Cell, *, topk_s: float, alpha_s: float) -> Measured:
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
        return Measured(
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
        """As `COLUMNS` have it."""
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


def verdicts(found: Sequence[Measured]) -> list[str]:
    """What was to be shown, and whether it was."""
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


def _compared(each: Measured) -> bool:
    return each.workers >= 8 and DENSITY * known_net(each.net).num_params >= 10_000


def _named(some: Sequence[Measured]) -> str:
    names = [f"{each.system} {each.net} {each.workers}{FULL if each.processor_full else ''}" for each in some]
    return f"; not: {', '.join(names)}" if names else ""
