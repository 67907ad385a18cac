"""Two sites of four hosts, 1 Gbit/s to a host and 20 Mbit/s between the sites: who trains how fast?

    python -m benchmarks.local_sites --parts lab --turns 1                             5 minutes
    python -m benchmarks.local_sites --parts simulated                                 digits-cnn, 3 minutes
    python -m benchmarks.local_sites --parts simulated --recipe mnist-cnn --data DIR --jobs 2      15 minutes

`lab`: emulated accelerators with 5 M parameters and 0.3 s per step on hosts of the lab, systems by turns in
the same processes, whole periods of each. `simulated`: the recipe is trained to its end on the virtual clock
of such a network, and the time to the recipe's target is read off.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD

from benchmarks.common import lab_worker, note, parser_of, print_head, print_row, result_file, run_in_lab
from benchmarks.rivals import find
from thinwire.bench.config import REFERENCE_NET
from thinwire.bench.harness import joined, slowest, time_steps, training
from thinwire.bench.plan import rotated
from thinwire.bench.systems import System, ours
from thinwire.hosts.description import Description, describe
from thinwire.lab.emulate import EmulatedModel
from thinwire.lab.nets import parse_net
from thinwire.lab.network import sent_by_this_host
from thinwire.recipes import registry
from thinwire.recipes.config import resolve
from thinwire.recipes.virtual import VirtualCluster, virtual_training
from thinwire.timings import BASELINE, CEILING

WORKERS = 8
EXACT = "all-reduce"
SYSTEMS = (
    CEILING,
    BASELINE,
    EXACT,
    "hierarchical-averaging:inside=gradients:interval=64",
    "diloco:fragments=5:delay=5",
    "diloco:fragments=5:delay=5:payload=int4",
    "trickle",
)
TALKING = tuple(name for name in SYSTEMS if name not in (BASELINE, CEILING))
LEAST_STEPS, LONG_STEPS = 8, 2
"""Timed steps; of systems that send everything in every step, fewer: each takes 14 seconds."""
LATENCY_S, UPLINK_LATENCY_S = 0.0004, 0.01
BATCH_SIZE = {"digits-cnn": 8, "mnist-cnn": 16}
"""Of a worker; of other recipes their own."""


def two_sites() -> Description:
    return describe(hosts=WORKERS, rate="1gbit", sites="4+4", uplink="20mbit")


# -- the lab --------------------------------------------------------------------------------------------


def measure_lab(turns: int) -> dict[str, Any]:
    """Time all systems by turns, and print the table."""
    note(f"lab: {turns} turns ...")
    reports = run_in_lab(
        two_sites(), "benchmarks.local_sites", "--worker", str(turns), time_limit_s=600
    ).reports
    alone = {r["turn"]: r["step_s"] for r in reports if r["system"] == CEILING}
    flat = statistics.median(r["step_s"] for r in reports if r["system"] == EXACT)
    print("\n### Step times in the lab\n")
    print_head(
        "system", "step, s", "of the ceiling's speed", "times all-reduce", "MB sent per step and worker"
    )
    for system in SYSTEMS:
        own = [r for r in reports if r["system"] == system]
        step_s = statistics.median(r["step_s"] for r in own)
        share = statistics.median(alone[r["turn"]] / r["step_s"] for r in own)
        sent = statistics.median(r["sent_bytes"] for r in own) / 1e6
        print_row(system, f"{step_s:.3f}", f"{100 * share:.1f} %", f"{flat / step_s:.1f}", f"{sent:.3f}")
    return {"net": REFERENCE_NET, "reports": reports}


def worker(turns: int) -> None:
    """Time every system, turn after turn, on one host of the lab."""
    with lab_worker() as control:
        for turn in range(turns):
            for name in rotated(SYSTEMS, turn):
                timed = _time(find(name) if name == BASELINE else ours(name))
                if dist.get_rank() == 0:
                    control.report({"system": name, "turn": turn, **timed})


def _time(system: System) -> dict[str, float]:
    """Seconds per step of the slowest worker, and bytes that this host has sent."""
    model = EmulatedModel(parse_net(REFERENCE_NET), seed=dist.get_rank())
    steps = max(system.period, LONG_STEPS if system.name in (BASELINE, EXACT) else LEAST_STEPS)
    with joined(system, model, SGD(model.parameters(), lr=0.01)) as (wrapped, optimizer, _):
        train = training(wrapped, optimizer)
        with model.instant():
            train(1 if steps == LONG_STEPS else steps)
        dist.barrier()
        timed = time_steps(train, steps, lambda: {"sent_bytes": float(sent_by_this_host())})
        dist.barrier()
    return {**timed, "step_s": slowest(timed["step_s"])}


# -- the simulator --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One training on the virtual clock."""

    recipe: str
    data: Path | None
    epochs: int
    compute_s: float

    def __call__(self, strategy: str) -> list[tuple[float, float]]:
        """Seconds and accuracy after every epoch."""
        torch.set_num_threads(1)
        recipe = registry.get(self.recipe)
        config = resolve(
            self.recipe,
            strategy,
            workers=WORKERS,
            batch_size=BATCH_SIZE.get(self.recipe, recipe.batch_size),
            epochs=self.epochs,
            data=self.data,
        )
        cluster = VirtualCluster(
            description=two_sites(),
            latency_s=LATENCY_S,
            uplink_latency_s=UPLINK_LATENCY_S,
            compute_s=self.compute_s,
        )
        with virtual_training(recipe, config, cluster) as run:
            while not run.done:
                run.epoch()
            return [(each.train_s, each.value or 0.0) for each in run.evaluations]


def simulate(training: Training, strategies: Sequence[str], jobs: int) -> dict[str, Any]:
    """Train with every strategy, and print the times to accuracy."""
    curves = dict[str, list[tuple[float, float]]]()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for name, curve in zip(strategies, pool.map(training, strategies), strict=True):
            note(f"simulated: {name}: {curve[-1][1]:.4f} after {curve[-1][0]:.1f} s")
            curves[name] = curve
    target = registry.get(training.recipe).target.value
    title = f"{training.recipe}, {training.epochs} epochs, {training.compute_s:g} s of compute per step"
    print(f"\n### {title}: seconds to an accuracy of {target:.1%}\n")
    print_head("strategy", "s to it", "times all-reduce", "final accuracy", "s of the whole training")
    to_exact_s = _to(target, curves[EXACT])
    for name, curve in curves.items():
        to_s = _to(target, curve)
        reached = ["never", "-"] if to_s is None else [f"{to_s:.1f}", f"{(to_exact_s or 0.0) / to_s:.1f}"]
        print_row(name, *reached, f"{curve[-1][1]:.2%}", f"{curve[-1][0]:.1f}")
    return {**asdict(training), "uplink_latency_s": UPLINK_LATENCY_S, "target": target, "curves": curves}


def _to(target: float, curve: Sequence[tuple[float, float]]) -> float | None:
    return next((at_s for at_s, value in curve if value >= target), None)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="lab,simulated", help="comma-separated (lab,simulated)")
    parser.add_argument("--turns", type=int, default=2, help="blocks of each system in the lab (2)")
    parser.add_argument("--recipe", default="digits-cnn", help="of the simulation; a classifier (digits-cnn)")
    parser.add_argument("--data", type=Path, help="folder with its data")
    parser.add_argument("--epochs", type=int, help="of the simulation (the recipe's own)")
    parser.add_argument("--compute", type=float, default=0.1, help="seconds per step simulated (0.1)")
    parser.add_argument("--strategies", default=",".join(TALKING), help="simulated; comma-separated (all)")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once (1)")
    parser.add_argument("--trial", action="store_true", help="not a result: save it below runs/")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.worker is not None:
        worker(arguments.worker)
        return
    file = result_file("local_sites", trial=arguments.trial)
    print("## benchmarks/local_sites.py")
    parts = arguments.parts.split(",")
    found: dict[str, Any] = {"config": vars(arguments), "network": two_sites().summary()}
    if "simulated" in parts:
        epochs = arguments.epochs or registry.get(arguments.recipe).epochs
        training = Training(
            recipe=arguments.recipe, data=arguments.data, epochs=epochs, compute_s=arguments.compute
        )
        strategies = dict.fromkeys([EXACT, *arguments.strategies.split(",")])
        found["simulated"] = simulate(training, list(strategies), arguments.jobs)
        file.save(found)
    if "lab" in parts:
        found["lab"] = measure_lab(arguments.turns)
        file.save(found)
    note(f"\nsaved {file.path}")


if __name__ == "__main__":
    main()
