"""Is the planner right? Step times of every strategy in the lab, and what the doctor has measured before.

    python -m benchmarks.plan_grid --workers 2,4,8
    thinwire plan --against benchmarks/results/plan_grid-....json

In each lab, at each rate, first the doctor's own measurements are taken, then every strategy trains every net
of that rate with the harness of `thinwire bench`. The result file holds both; `thinwire plan --against`
predicts each cell from the constants of its lab, and compares. Nothing is fitted to the measured steps.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.common import lab_worker, note, parser_of, result_file, run_in_lab
from thinwire.bench.config import QUICK
from thinwire.bench.harness import LabPaths, block_without_times, time_block
from thinwire.bench.systems import ours
from thinwire.hosts.description import describe
from thinwire.hosts.quantities import format_rate, parse_counts, parse_rate
from thinwire.planner.speeds import cluster_of, gather_speeds
from thinwire.timings import GridCell

SYSTEMS = (
    "silent",
    "all-reduce",
    "all-reduce:overlap=forward",
    "gossip-grad",
    "gossip-grad:share=0.1",
    "stochastic-gradient-push",
    "topk",
    "gtopk",
    "oktopk",
    "sasgd",
    "trickle",
    "partial-averaging",
    "diloco:interval=10",
    "diloco:fragments=5:delay=5",
    "post-local:exact_steps=0",
    "hierarchical-averaging",
    "downpour",
    "easgd",
)
SMALL = "params=2.5e5,layers=8,forward=0.04,backward=0.08"
MIDDLE = "params=1e6,layers=12,forward=0.06,backward=0.12"
LARGE = "params=4e6,layers=16,forward=0.08,backward=0.16"
CELLS = {"20mbit": (SMALL, MIDDLE), "200mbit": (MIDDLE, LARGE), "1gbit": (LARGE,)}


def worker(cells: dict[str, list[str]], systems: list[str], block_s: float) -> None:
    """Measure the constants, then train, at every rate, on every host of the lab."""
    with lab_worker() as control:
        paths, config = LabPaths(control), replace(QUICK, block_s=block_s)
        speeds = gather_speeds([True] * dist.get_world_size())
        for rate, nets in cells.items():
            bits_per_s = parse_rate(rate)
            paths.set_rate(bits_per_s)
            cluster = cluster_of(bits_per_s, speeds)
            if dist.get_rank() == 0:
                control.report({"rate": rate, "cluster": asdict(cluster)})
            for net in nets:
                for system in map(ours, systems):
                    cell = GridCell(dist.get_world_size(), bits_per_s, net)
                    block = block_without_times(cell, 0, system, None)
                    timed = time_block(block, system, paths, config)
                    if dist.get_rank() == 0:
                        full = timed.processor_full
                        found = {"rate": rate, "net": net, "strategy": system.name, "step_s": timed.step_s}
                        control.report({**found, "processor_full": full, "processor_s": timed.processor_s})
                        words = f"{rate}, {net.split(',')[0]}, {system.name}: {timed.step_s:.3f} s"
                        note(f"  {words}{', processor full' if full else ''}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", default="2,4,8")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--cells", default=json.dumps(CELLS), help="JSON: nets by rate")
    parser.add_argument("--block", type=float, default=1.0, help="timed seconds of a block")
    parser.add_argument("--trial", action="store_true", help="keep the result out of benchmarks/results")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cells, systems = json.loads(arguments.cells), arguments.systems.split(",")
    if arguments.inside:
        worker(cells, systems, arguments.block)
        return
    file = result_file("plan_grid", trial=arguments.trial)
    clusters, measured, path = list[dict[str, Any]](), list[dict[str, Any]](), Path()
    for workers in parse_counts(arguments.workers):
        note(f"{workers} workers ...")
        inside = ("--inside", "--cells", arguments.cells, "--systems", arguments.systems)
        options = (*inside, "--block", str(arguments.block))
        lab = describe(hosts=workers, rate=format_rate(10e9))
        outcome = run_in_lab(lab, "benchmarks.plan_grid", *options, time_limit_s=1500)
        for found in outcome.reports:
            (clusters if "cluster" in found else measured).append({"workers": workers, **found})
        path = file.save({"clusters": clusters}, cells=measured)
    note(f"saved {path}")


if __name__ == "__main__":
    main()
