"""Contenders timed in the same processes, one short block after another, again and again.

So a busy moment of the machine hits all of them, and a ratio can be taken within one turn.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import thinwire as tw
from thinwire.lab.emulate import Emulated
from thinwire.strategies.base import Strategy

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to train the same model."""

    name: str
    strategy: Strategy | None = None
    """None is torch's DistributedDataParallel."""
    bucket_bytes: int | None = None
    """None is each one's own choice: 25 MiB for DDP, the first one 1 MiB."""
    views: bool = False
    """DDP's `gradient_as_bucket_view`."""


CEILING = Contender(name="Silent (ceiling)", strategy=tw.Silent())


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How long each is timed, on what."""

    net: str
    turns: int = 12
    """How often each contender gets a block."""
    steps: int = 8
    """Timed steps per block."""
    warm_up_steps: int = 6
    """DDP settles on its buckets in the first ones; we count gradients in the first, and with
    overlap="forward" agree on an order after the fourth."""


@dataclass(frozen=True, slots=True)
class Block:
    """One contender's steps in one turn, on one worker or, as the slowest, on all."""

    contender: str
    turn: int
    step_s: float
    processor_s: float
    """Per step, all threads of the process."""
    exposed_s: float


def run_blocks(contenders: Sequence[Contender], config: Config) -> list[Block]:
    """What one worker of the world does, with its process group up."""
    blocks = []
    for turn in range(config.turns):
        # Another order each time, the same on all workers: nobody always comes after the same one.
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            model = Emulated.parse(config.net, seed=dist.get_rank())
            blocks.append(_block(contender, turn, model, config))
            del model
            gc.collect()
    return blocks


def _block(contender: Contender, turn: int, model: nn.Module, config: Config) -> Block:
    optimizer = SGD(model.parameters(), lr=0.01)
    size = contender.bucket_bytes
    if contender.strategy is not None:
        with tw.attach(model, optimizer, contender.strategy, bucket_bytes=size) as link:
            step_s, processor_s, exposed_s = _time(model, optimizer, config, lambda: link.stats.exposed_s)
    else:
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=size and size / MIB, gradient_as_bucket_view=contender.views
        )
        step_s, processor_s, exposed_s = _time(wrapped, optimizer, config, lambda: 0.0)
    return Block(contender.name, turn, step_s, processor_s, exposed_s)


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


def clocks(blocks: Sequence[Block], contender: str) -> dict[int, float]:
    """Seconds per step of one contender by turn."""
    return {block.turn: block.step_s for block in blocks if block.contender == contender}


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """The median, and the quartiles around it."""
    low, middle, high = statistics.quantiles((scale * v for v in values), n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(blocks: Sequence[Block], contenders: Sequence[Contender], rival: str) -> list[str]:
    """Markdown rows; ratios of step times are taken within a turn."""
    base, ceiling = clocks(blocks, rival), clocks(blocks, CEILING.name)
    lines = [
        f"| contender | step, ms | ratio to {rival} | ratio to ceiling | processor, ms | exposed, ms |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for contender in contenders:
        own = [block for block in blocks if block.contender == contender.name]
        cells = [
            contender.name,
            spread([b.step_s for b in own], 1e3),
            spread([b.step_s / base[b.turn] for b in own], digits=3),
            spread([b.step_s / ceiling[b.turn] for b in own], digits=3),
            spread([b.processor_s for b in own], 1e3),
            spread([b.exposed_s for b in own], 1e3) if contender.strategy is not None else "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
