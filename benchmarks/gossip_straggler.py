"""One of eight workers computes at half speed: how fast are the other seven?

The lab's slow host waits twice as long in every layer of the emulated accelerator. Everyone is timed by its
own clock and held against its own speed when nothing is sent. Those who wait for each other do equally many
steps; those who do not, as many as their speed allows in about the same time.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import SGD

import thinwire as tw
from thinwire.bench.config import REFERENCE_NET
from thinwire.hosts.description import describe
from thinwire.lab.control import Control
from thinwire.lab.emulate import Emulated
from thinwire.lab.job import Job
from thinwire.lab.pace import Pace
from thinwire.lab.run import run
from thinwire.strategies.base import Strategy

WORKERS, SLOW, SPEED = 8, 7, 0.5
GOAL = 0.95
"""Of their own speed, for the seven."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """On what, for how long. Rate and net are a fourth of 1 Gbit/s and 5 M parameters, since two cores would
    be the limit with more."""

    net: str = REFERENCE_NET
    scale: float = 0.25
    rate_bit_per_s: float = 1e9
    turns: int = 3
    steps: int = 24
    """Of a worker at full speed."""
    warm_up_steps: int = 6


CONFIG = Config()


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    strategy: Strategy
    waits: bool
    """For others, in every step."""


CEILING = Contender("Silent (ceiling)", tw.Silent(), waits=False)
CONTENDERS = (
    CEILING,
    Contender("AllReduce", tw.AllReduce(), waits=True),
    Contender("GossipGraD", tw.GossipGraD(), waits=True),
    Contender("GossipGraD asynchronous", tw.GossipGraD(asynchronous=True), waits=False),
)


def measure(config: Config) -> dict[str, Any]:
    """The table, and all there is to keep."""
    print(f"straggler: {WORKERS} hosts, {config.turns} turns ...", file=sys.stderr, flush=True)
    rate = f"{config.rate_bit_per_s * config.scale:.0f}bit"
    lab = describe(hosts=WORKERS, rate=rate, slow=[f"{SLOW}={SPEED}"])
    command = ("-m", "benchmarks.gossip_straggler", json.dumps(dataclasses.asdict(config)))
    outcome = run(Job(description=lab, command=command, time_limit_s=1200))
    if outcome.exit_code != 0:
        raise SystemExit(f"the workers in the lab failed with exit code {outcome.exit_code}")
    alone = {(r["rank"], r["turn"]): r["step_s"] for r in outcome.reports if r["contender"] == CEILING.name}
    print(f"\n### Straggler: {WORKERS} workers, one at {SPEED:g} of its speed\n")
    print("| strategy | the other seven, of their own speed | the slowest of them | the slow one | step, s |")
    print("|" + " --- |" * 5)
    for contender in CONTENDERS:
        own = [r for r in outcome.reports if r["contender"] == contender.name]
        speeds = [(r["rank"], alone[r["rank"], r["turn"]] / r["step_s"]) for r in own]
        others = [speed for rank, speed in speeds if rank != SLOW]
        slow = [speed for rank, speed in speeds if rank == SLOW]
        step_s = statistics.median(r["step_s"] for r in own if r["rank"] != SLOW)
        cells = [statistics.median(others), min(others), statistics.median(slow)]
        row = [contender.name, *(f"{100 * cell:.1f} %" for cell in cells), f"{step_s:.3f}"]
        print("| " + " | ".join(row) + " |")
    print(f"\ngoal: the seven keep {100 * GOAL:.0f} % of their own speed", flush=True)
    return {"config": dataclasses.asdict(config), "reports": outcome.reports}


def worker(config: Config) -> None:
    """What one worker in the lab does: every contender, turn after turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control, pace = Control.of_this_worker(), Pace.of_this_worker()
    assert control is not None, "to be run in a lab"
    assert pace is not None, "every worker of a lab has one"
    for turn in range(config.turns):
        first = turn % len(CONTENDERS)
        for contender in (*CONTENDERS[first:], *CONTENDERS[:first]):
            share = 1.0 if contender.waits else pace.speed
            control.report(
                {
                    "contender": contender.name,
                    "turn": turn,
                    "rank": dist.get_rank(),
                    **_time(contender.strategy, config, share),
                }
            )
    dist.barrier()
    dist.destroy_process_group()


def _time(strategy: Strategy, config: Config, share: float) -> dict[str, Any]:
    """Seconds per step by this worker's clock, and what the strategy tells of itself."""
    model = Emulated.parse(config.net, scale=config.scale, seed=dist.get_rank())
    optimizer = SGD(model.parameters(), lr=0.01)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(8, 1)).mean().backward()
            optimizer.step()

    with tw.attach(model, optimizer, strategy) as link:
        train(round(config.warm_up_steps * share))
        steps, began_s, before = round(config.steps * share), time.perf_counter(), link.stats
        train(steps)
        took_s, after = time.perf_counter() - began_s, link.stats
    return {
        "step_s": took_s / steps,
        "exposed_s": (after.exposed_s - before.exposed_s) / steps,
        "sent_bytes": (after.sent_bytes - before.sent_bytes) / steps,
        "instruments": dict(after.instruments),
    }


if __name__ == "__main__":
    worker(Config(**json.loads(sys.argv[1])))
