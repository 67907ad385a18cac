"""Exact SGD on shaped paths: how much of the communication hides, against DDP at its best bucket size.

The lab's hosts are joined by paths so thin that an all-reduce of the whole gradient takes 0.5, 1 or 2 times
the compute of a step. DDP hides communication behind backward only; `overlap="forward"` behind all of it.
By arithmetic, with many small layers, f and b = 2 f seconds of forward and backward and c of communication,
DDP needs f + max(b, c) and a bit, "forward" max(b + f, c) and a bit: 1.33 times less at c = b + f.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks.blocks import (
    CEILING,
    MIB,
    Block,
    Config,
    Contender,
    clocks,
    of_everyone,
    run_blocks,
    spread,
    table,
)
from thinwire.hosts.description import describe
from thinwire.lab.control import Control
from thinwire.lab.job import Job
from thinwire.lab.nets import parse_net
from thinwire.lab.run import run

RATIOS = (0.5, 1.0, 2.0)
"""Seconds of communication over seconds of compute."""
RIVALS = (
    Contender(name="DDP 1 MiB", bucket_bytes=MIB),
    Contender(name="DDP 4 MiB", bucket_bytes=4 * MIB),
    Contender(name="DDP 25 MiB"),  # as it comes: only then its first bucket is one of 1 MiB
)
OURS = (
    Contender(name="AllReduce forward", strategy=tw.AllReduce(overlap="forward")),
    Contender(name="AllReduce backward", strategy=tw.AllReduce(overlap="backward")),
)
CONTENDERS = (*RIVALS, *OURS, CEILING)
CONFIG = Config(net="params=3e6,layers=24,forward=0.1,backward=0.2", steps=6)
TIME_LIMIT_S = 1200


def rate_bit_per_s(config: Config, world_size: int, ratio: float) -> float:
    """The rate at which a ring all-reduce of all gradients takes `ratio` times the compute of a step."""
    net = parse_net(config.net)
    sent_bytes = 2 * (world_size - 1) / world_size * net.num_params * 4
    return 8 * sent_bytes / (ratio * (net.forward_s + net.backward_s))


def measure(config: Config, world_sizes: Sequence[int]) -> dict[str, Any]:
    """Tables for each world size and ratio, a summary of speed-ups, and all there is to keep."""
    raw: dict[str, Any] = {}
    rows = []
    for world_size in world_sizes:
        print(f"shaped: {world_size} hosts, {config.turns} turns ...", file=sys.stderr, flush=True)
        rates = [rate_bit_per_s(config, world_size, ratio) for ratio in RATIOS]
        command = ("-m", "benchmarks.exact_shaped", json.dumps([dataclasses.asdict(config), rates]))
        lab = describe(hosts=world_size, rate=f"{rates[0]:.0f}bit")
        outcome = run(Job(description=lab, command=command, time_limit_s=TIME_LIMIT_S))
        if outcome.exit_code != 0:
            raise SystemExit(f"the workers in the lab failed with exit code {outcome.exit_code}")
        for number, (ratio, rate) in enumerate(zip(RATIOS, rates, strict=True)):
            mine = [report for report in outcome.reports if report["ratio"] == number]
            blocks = of_everyone([[Block(*row) for row in report["blocks"]] for report in mine])
            rival = fastest(blocks)
            raw[f"{world_size} workers, ratio {ratio:g}"] = {
                "rate_bit_per_s": rate,
                "best_rival": rival,
                "busy": [report["busy"] for report in mine],
                "blocks": [dataclasses.asdict(block) for block in blocks],
            }
            print(f"\n### Shaped: {world_size} workers, {rate / 1e6:.0f} Mbit/s, ratio {ratio:g}\n")
            print("\n".join(table(blocks, CONTENDERS, rival)), flush=True)
            rows.append([str(world_size), f"{ratio:g}", rival, *(speed_up(blocks, c, rival) for c in OURS)])
    print("\n### Shaped: times faster than DDP with its best bucket size\n")
    print("| workers | ratio | best rival | " + " | ".join(c.name for c in OURS) + " |")
    print("|" + " --- |" * (3 + len(OURS)))
    print("\n".join("| " + " | ".join(row) + " |" for row in rows), flush=True)
    return {"config": dataclasses.asdict(config), "ratios": RATIOS, "cells": raw}


def fastest(blocks: Sequence[Block]) -> str:
    """The rival with the smallest median step."""
    return min((c.name for c in RIVALS), key=lambda name: statistics.median(clocks(blocks, name).values()))


def speed_up(blocks: Sequence[Block], contender: Contender, rival: str) -> str:
    """How many times faster than the rival, turn by turn."""
    own = clocks(blocks, contender.name)
    return spread([step_s / own[turn] for turn, step_s in clocks(blocks, rival).items()], digits=3)


def worker(config: Config, rates: Sequence[float]) -> None:
    """What one worker in the lab does: all contenders at every rate."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    control = Control.of_this_worker()
    assert control is not None, "to be run in a lab"
    for number, rate in enumerate(rates):
        if dist.get_rank() == 0:
            control.set_rate(rate)
            control.restart_load()
        dist.barrier()
        blocks = run_blocks(CONTENDERS, config)
        busy, _ = control.load()
        rows = [dataclasses.astuple(block) for block in blocks]
        control.report({"ratio": number, "busy": busy, "blocks": rows})
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    given, given_rates = json.loads(sys.argv[1])
    worker(Config(**given), given_rates)
