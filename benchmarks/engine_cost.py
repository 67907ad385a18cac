"""What the engine costs the processor in a step of a ResNet-20 at batch 32, one thread.

Three ways, because each misses something:

- difference: processor seconds of the process per step, attached less plain, in a world of one. It has
  everything, also what autograd pays to call a hook, but it is a small difference of two large numbers.
- hooks: processor seconds of the training thread inside the engine, from entering one of its entry points
  (the gradient hook, the end of backward, before and after the optimizer's step) to leaving it.
- threads: processor seconds of the engine's own threads (progress, lanes, watch), from the kernel's books.

Hooks and threads are taken in a world of one and in one of two workers. What the backend spends is not the
engine's: Gloo's threads are not in there, and calls that start an operation of torch.distributed are taken
off the hooks and given a row of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.optim import SGD, Optimizer

import thinwire as tw
from benchmarks.provenance import run_workers
from thinwire.engine.arrivals import Arrivals
from thinwire.engine.link import Link

ENTRIES = [
    (Arrivals, "_arrived"),
    (Arrivals, "_graph_ends"),
    (Link, "_before_step"),
    (Link, "_after_step"),
]
"""Where the training thread comes into the engine during a step."""
BACKEND = [(dist, "all_reduce"), (dist, "broadcast")]
"""Where it goes on into the backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    batch: int = 32
    turns: int = 15
    steps: int = 5


@dataclass(frozen=True, slots=True)
class Cost:
    """Per step, in one turn, on one worker."""

    step_s: float
    """By the clock."""
    processor_s: float
    """All threads of the process."""
    hooks_s: float
    backend_s: float
    threads_s: float


class _Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride, self.widening = stride, width - width_in
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        short = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widening))
        return torch.relu(h + short)


def resnet20() -> nn.Module:
    """He et al., 2015, for 32 x 32 images: 0.27 M parameters, 65 tensors."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    width_in = 16
    for width, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            layers.append(_Block(width_in, width, stride if block == 0 else 1))
            width_in = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Timer:
    """Adds up the processor seconds the training thread spends inside some functions.

    Reading that clock is a system call of up to some microseconds, so what a reading costs is taken off.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._reading_s = 0.0
        self._inside = False

    def calibrate(self) -> None:
        """What two readings of the clock right after each other are apart."""
        readings = [time.thread_time() for _ in range(1001)]
        self._reading_s = statistics.median(b - a for a, b in itertools.pairwise(readings))

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **settings: Any) -> Any:
            if self._inside or threading.current_thread() is not threading.main_thread():
                return function(*args, **settings)
            self._inside = True
            began_s = time.thread_time()
            try:
                return function(*args, **settings)
            finally:
                self.total_s += time.thread_time() - began_s - self._reading_s
                self._inside = False

        return call

    @contextmanager
    def installed(self, places: Sequence[tuple[Any, str]]) -> Iterator[None]:
        """Time these functions, given as where they are and what they are called."""
        originals = [getattr(holder, name) for holder, name in places]
        for (holder, name), function in zip(places, originals, strict=True):
            setattr(holder, name, self.timed(function))
        try:
            yield
        finally:
            for (holder, name), function in zip(places, originals, strict=True):
                setattr(holder, name, function)


def threads_s() -> float:
    """Processor seconds that the living threads of the engine have used so far."""
    total_ns = 0
    for thread in threading.enumerate():
        if thread.name.startswith("thinwire"):
            books = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            total_ns += int(books.read_text().split()[0])
    return total_ns / 1e9


def steps(model: nn.Module, optimizer: Optimizer, config: Config, hooks: Timer, backend: Timer) -> Cost:
    x = torch.randn(config.batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(config.batch) % 10

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    def clocks() -> tuple[float, ...]:
        inside_s = hooks.total_s - backend.total_s
        return time.perf_counter(), time.process_time(), inside_s, backend.total_s, threads_s()

    train(2)
    hooks.calibrate()
    backend.calibrate()
    before = clocks()
    train(config.steps)
    return Cost(*((b - a) / config.steps for a, b in zip(before, clocks(), strict=True)))


def attached(config: Config) -> Cost:
    model = resnet20()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    hooks, backend = Timer(), Timer()
    with (
        hooks.installed(ENTRIES),
        backend.installed(BACKEND),
        tw.attach(model, optimizer, tw.AllReduce()),
    ):
        return steps(model, optimizer, config, hooks, backend)


def plain(config: Config) -> Cost:
    model = resnet20()
    return steps(model, SGD(model.parameters(), lr=0.01, momentum=0.9), config, Timer(), Timer())


def one_worker(config: Config) -> dict[str, list[Cost]]:
    """Plain and attached by turns, in this process, which is in no world."""
    torch.set_num_threads(1)
    costs: dict[str, list[Cost]] = {"plain": [], "attached": []}
    for turn in range(config.turns):
        for name in sorted(costs, reverse=turn % 2 == 1):
            costs[name].append(plain(config) if name == "plain" else attached(config))
    return costs


def one_of_two(config: Config) -> list[Cost]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    costs = [attached(config) for _ in range(config.turns)]
    dist.destroy_process_group()
    return costs


def row(name: str, seconds: Sequence[float], step_s: Sequence[float]) -> str:
    share = statistics.median(a / b for a, b in zip(seconds, step_s, strict=True))
    low, middle, high = statistics.quantiles((1e3 * s for s in seconds), n=4, method="inclusive")
    return f"| {name} | {middle:.2f} ({low:.2f} to {high:.2f}) | {share:.2%} |"


def measure(config: Config) -> dict[str, Any]:
    print(f"engine cost: {config.turns} turns ...", file=sys.stderr, flush=True)
    alone = one_worker(config)
    first, second = run_workers(2, one_of_two, config)
    ours, bare = alone["attached"], alone["plain"]
    plain_s = [c.processor_s for c in bare]
    print(f"\n### Processor time of the engine, ResNet-20, batch {config.batch}\n")
    print("| what | ms per step | share of a plain step's processor time |")
    print("| --- | --- | --- |")
    print(row("a plain step", plain_s, plain_s))
    print(
        row("difference", [a.processor_s - b.processor_s for a, b in zip(ours, bare, strict=True)], plain_s)
    )
    print(row("hooks", [c.hooks_s for c in ours], plain_s))
    print(row("threads", [c.threads_s for c in ours], plain_s))
    print(row("hooks, 2 workers", [c.hooks_s for c in first], plain_s))
    print(row("threads, 2 workers", [c.threads_s for c in first], plain_s))
    print(row("starting operations, 2 workers", [c.backend_s for c in first], plain_s), flush=True)
    raw = {"alone, plain": bare, "alone, attached": ours, "rank 0 of 2": first, "rank 1 of 2": second}
    costs = {name: [dataclasses.asdict(c) for c in each] for name, each in raw.items()}
    return {"config": dataclasses.asdict(config), "costs": costs}
