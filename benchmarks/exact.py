"""Exact SGD: thinwire's AllReduce against torch's DDP, and what the engine costs the processor.

    python -m benchmarks.exact            about 15 minutes on 2 quiet cores
    python -m benchmarks.exact --quick    about 2 minutes; shows that it works, not a result

Part 1, speed: every worker trains the same emulated accelerator (layers that sleep like a GPU would;
gradients that travel for real over Gloo on loopback). All contenders run in the same processes, one short
block after another, again and again, so that a busy moment of the machine hits all of them. Every ratio is
taken within one such turn. Part 2, cost: see engine_cost.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import thinwire as tw
from benchmarks import engine_cost
from benchmarks.provenance import provenance, run_workers, save
from thinwire.lab.emulate import Emulated
from thinwire.strategies.base import Strategy

OURS: dict[str, Strategy] = {
    "AllReduce forward": tw.AllReduce(overlap="forward"),
    "AllReduce backward": tw.AllReduce(overlap="backward"),
    "AllReduce none": tw.AllReduce(overlap="none"),
    "Silent (ceiling)": tw.Silent(),
}
RIVAL = "DDP"
CONTENDERS = (RIVAL, "DDP, gradients as views", *OURS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One speed measurement."""

    net: str = "params=6e6,layers=24,forward=0.1,backward=0.2"
    bucket_bytes: int = 4 << 20
    """For DDP as for us; the first bucket of both is at most 1 MiB."""
    turns: int = 12
    """How often each contender gets a block."""
    steps: int = 8
    """Timed steps per block."""
    warm_up_steps: int = 6
    """DDP settles on its buckets in the first ones; we count gradients in the first, and with
    overlap="forward" agree on an order after the fourth."""


@dataclass(frozen=True, slots=True)
class Block:
    """One contender's steps in one turn, on one worker."""

    contender: str
    turn: int
    step_s: float
    processor_s: float
    """Per step, all threads of the process."""
    exposed_s: float


def speed(config: Config) -> list[Block]:
    """What one worker of the world does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    blocks = []
    for turn in range(config.turns):
        # Another order each time, the same on all workers: nobody always comes after the same one.
        order = CONTENDERS[turn % len(CONTENDERS) :] + CONTENDERS[: turn % len(CONTENDERS)]
        for contender in order:
            model = Emulated.parse(config.net, seed=dist.get_rank())
            blocks.append(_block(contender, turn, model, config))
            del model
            gc.collect()
    dist.destroy_process_group()
    return blocks


def _block(contender: str, turn: int, model: nn.Module, config: Config) -> Block:
    optimizer = SGD(model.parameters(), lr=0.01)
    if contender in OURS:
        with tw.attach(model, optimizer, OURS[contender], bucket_bytes=config.bucket_bytes) as link:
            step_s, processor_s, exposed_s = _time(model, optimizer, config, lambda: link.stats.exposed_s)
    else:
        views = contender != RIVAL
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=config.bucket_bytes / 2**20, gradient_as_bucket_view=views
        )
        step_s, processor_s, exposed_s = _time(wrapped, optimizer, config, lambda: 0.0)
    return Block(contender, turn, step_s, processor_s, exposed_s)


def _time(
    model: nn.Module, optimizer: SGD, config: Config, exposed: Callable[[], float]
) -> tuple[float, float, float]:
    """Seconds per step: by the clock, of the processor, and waiting for the wire."""
    x = torch.ones(8, 1)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()

    train(config.warm_up_steps)
    dist.barrier()
    before = time.perf_counter(), time.process_time(), exposed()
    train(config.steps)
    dist.barrier()  # a step is over when the slowest worker has done it
    after = time.perf_counter(), time.process_time(), exposed()
    step_s, processor_s, exposed_s = ((b - a) / config.steps for a, b in zip(before, after, strict=True))
    return step_s, processor_s, exposed_s


def of_everyone(workers: Sequence[Sequence[Block]]) -> list[Block]:
    """The workers' blocks as one: the slowest clock, the mean processor and waiting time."""
    return [
        dataclasses.replace(
            blocks[0],
            step_s=max(b.step_s for b in blocks),
            processor_s=statistics.mean(b.processor_s for b in blocks),
            exposed_s=statistics.mean(b.exposed_s for b in blocks),
        )
        for blocks in zip(*workers, strict=True)
    ]


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """The median, and the quartiles around it."""
    low, middle, high = statistics.quantiles((scale * v for v in values), n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def speed_table(blocks: Sequence[Block]) -> list[str]:
    """Markdown rows; ratios of step times are taken within a turn."""
    clock = {name: {b.turn: b.step_s for b in blocks if b.contender == name} for name in CONTENDERS}
    ceiling = clock["Silent (ceiling)"]
    lines = [
        "| contender | step, ms | ratio to DDP | ratio to ceiling | processor, ms per step | exposed, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in CONTENDERS:
        own = [b for b in blocks if b.contender == name]
        cells = [
            name,
            spread([b.step_s for b in own], 1e3),
            spread([b.step_s / clock[RIVAL][b.turn] for b in own], digits=3),
            spread([b.step_s / ceiling[b.turn] for b in own], digits=3),
            spread([b.processor_s for b in own], 1e3),
            spread([b.exposed_s for b in own], 1e3) if name in OURS else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def measure_speed(config: Config, world_sizes: Sequence[int]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    for world_size in world_sizes:
        print(f"speed: {world_size} workers, {config.turns} turns ...", file=sys.stderr, flush=True)
        blocks = of_everyone(run_workers(world_size, speed, config))
        raw[str(world_size)] = [dataclasses.asdict(block) for block in blocks]
        print(f"\n### Speed, {world_size} workers\n")
        print("\n".join(speed_table(blocks)), flush=True)
    return {"config": dataclasses.asdict(config), "blocks": raw}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exact", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="few and short blocks, to see that it works")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="world sizes (default: 2 4)")
    parser.add_argument("--turns", type=int, default=Config().turns, help="times each contender has its turn")
    arguments = parser.parse_args()
    config, cost_config = Config(turns=arguments.turns), engine_cost.Config()
    if arguments.quick:
        config = dataclasses.replace(config, turns=3, steps=2)
        cost_config = dataclasses.replace(cost_config, turns=3, steps=2)

    begin = provenance()
    print("## benchmarks/exact.py" + (" (quick: not a result)" if arguments.quick else ""))
    print("\nMedian, with quartiles in parentheses.", flush=True)
    speeds = measure_speed(config, arguments.workers)
    cost = engine_cost.measure(cost_config)
    result = {"begin": begin, "end": provenance(), "speed": speeds, "engine_cost": cost}
    print(f"\nsaved {save('exact', result, trial=arguments.quick)}", file=sys.stderr)


if __name__ == "__main__":
    main()
