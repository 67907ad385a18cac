"""One of eight workers computes at half speed: how fast are the other seven?

The lab's slow host waits twice as long in every layer of the emulated accelerator. Every worker is timed by
its own clock and compared with its own speed when nothing is sent. Strategies that wait for every worker do
equally many steps on all; the others do as many as their speed allows in about the same time.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.optim import SGD

from benchmarks.common import lab_worker, note, print_head, print_row, run_in_lab
from thinwire.bench.config import REFERENCE_NET
from thinwire.bench.harness import time_steps, training
from thinwire.bench.plan import rotated, whole_periods
from thinwire.bench.systems import Ours, ours
from thinwire.hosts.description import describe
from thinwire.lab.control import HostStatus
from thinwire.lab.emulate import EmulatedModel
from thinwire.lab.nets import parse_net
from thinwire.timings import CEILING

WORKERS, SLOW, SPEED = 8, 7, 0.5
GOAL = 0.95
"""Least speed of the seven, relative to their own."""
WAITS = {CEILING: False, "all-reduce": True, "gossip-grad": True, "stochastic-gradient-push": False}
"""By system: whether workers wait for each other in every step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerConfig:
    """Net and rate are a fourth of 5 M parameters and 1 Gbit/s: with more, two cores would be the limit."""

    net: str = REFERENCE_NET
    scale: float = 0.25
    rate_bit_per_s: float = 1e9
    turns: int = 3
    steps: int = 24
    """Timed steps of a worker at full speed."""
    warm_up_steps: int = 6


def measure(config: StragglerConfig) -> dict[str, Any]:
    """Print the table, and return the configuration and all reports."""
    note(f"straggler: {WORKERS} hosts, {config.turns} turns ...")
    rate = f"{config.rate_bit_per_s * config.scale:.0f}bit"
    lab = describe(hosts=WORKERS, rate=rate, slow=[f"{SLOW}={SPEED}"])
    settings = dataclasses.asdict(config)
    reports = run_in_lab(lab, "benchmarks.gossip_straggler", json.dumps(settings)).reports
    alone = {(r["rank"], r["turn"]): r["step_s"] for r in reports if r["system"] == CEILING}
    print(f"\n### Straggler: {WORKERS} workers, one at {SPEED:g} of its speed\n")
    print_head(
        "system", "the other seven, of their own speed", "the slowest of them", "the slow one", "step, s"
    )
    for system in WAITS:
        own = [r for r in reports if r["system"] == system]
        speeds = [(r["rank"], alone[r["rank"], r["turn"]] / r["step_s"]) for r in own]
        others = [speed for rank, speed in speeds if rank != SLOW]
        slow = [speed for rank, speed in speeds if rank == SLOW]
        step_s = statistics.median(r["step_s"] for r in own if r["rank"] != SLOW)
        shares = [statistics.median(others), min(others), statistics.median(slow)]
        print_row(system, *(f"{100 * share:.1f} %" for share in shares), f"{step_s:.3f}")
    print(f"\ngoal: the seven keep {100 * GOAL:.0f} % of their own speed", flush=True)
    return {"config": settings, "reports": reports}


def worker(config: StragglerConfig) -> None:
    """Time every system, turn after turn, on one host of the lab."""
    pace = HostStatus.from_environment()
    assert pace is not None, "every worker of a lab has one"
    with lab_worker() as control:
        for turn in range(config.turns):
            for name in rotated(list(WAITS), turn):
                timed = _time(ours(name), config, 1.0 if WAITS[name] else pace.speed)
                control.report({"system": name, "turn": turn, "rank": dist.get_rank(), **timed})


def _time(system: Ours, config: StragglerConfig, share: float) -> dict[str, Any]:
    """Seconds per step by this worker's clock, and the counters and instruments of its strategy."""
    model = EmulatedModel(parse_net(config.net, scale=config.scale), seed=dist.get_rank())
    optimizer = SGD(model.parameters(), lr=0.01)
    train = training(model, optimizer)
    steps = round(whole_periods(config.steps, system.period) * share)
    with system.attach(model, optimizer) as link:
        train(round(config.warm_up_steps * share))
        timed = time_steps(
            train, steps, lambda: {"exposed_s": link.stats.exposed_s, "sent_bytes": link.stats.sent_bytes}
        )
        return {**timed, "instruments": dict(link.stats.instruments)}


if __name__ == "__main__":
    worker(StragglerConfig(**json.loads(sys.argv[1])))
