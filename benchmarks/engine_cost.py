"""Processor time of the engine in a step of a ResNet-20 at batch 32, one thread.

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

import functools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import thinwire as tw
from benchmarks.common import note, print_head, print_row, run_workers, spread_of
from thinwire.bench.harness import time_steps
from thinwire.bench.plan import rotated
from thinwire.engine.attachment import Attachment
from thinwire.engine.backward_hooks import BackwardHooks
from thinwire.engine.runtime import LinkRuntime
from thinwire.recipes.networks import resnet20

ENTRIES = [
    (BackwardHooks, "_arrived"),
    (BackwardHooks, "_graph_ends"),
    (Attachment, "_check_step"),
    (LinkRuntime, "_before_step"),
    (LinkRuntime, "_after_step"),
]
"""The functions in which the training thread enters the engine during a step."""
BACKEND = [(dist.ProcessGroupGloo, "allreduce"), (dist.ProcessGroupGloo, "broadcast")]
"""The functions in which it enters the backend."""


BATCH, STEPS, WARM_UP_STEPS = 32, 5, 2

Cost = dict[str, float]
"""Seconds per step in one turn on one worker: step, processor, hooks, backend, threads."""


class ThreadTimer:
    """Adds up the processor seconds the training thread spends inside some functions.

    Reading that clock is a system call of some microseconds, so what the timer itself costs is taken off.
    """

    def __init__(self, own_s: float) -> None:
        self.total_s = 0.0
        self._own_s = own_s
        self._inside = False

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
                self.total_s += time.thread_time() - began_s - self._own_s
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


def timer_s() -> float:
    """What the timer costs in the middle of backward, where hardly anything is in the cache: the median of
    hooks that do nothing."""
    model, timer, costs = resnet20(), ThreadTimer(0.0), list[float]()

    def do_nothing(_: torch.Tensor) -> None:
        """A hook."""

    timed = timer.timed(do_nothing)

    def hook(parameter: torch.Tensor) -> None:
        before_s = timer.total_s
        timed(parameter)
        costs.append(timer.total_s - before_s)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(WARM_UP_STEPS + STEPS):
        model(torch.randn(BATCH, 3, 32, 32)).sum().backward()
    return statistics.median(costs)


def threads_s() -> float:
    """Processor seconds that the living threads of the engine have used so far."""
    total_ns = 0
    for thread in threading.enumerate():
        if thread.name.startswith("thinwire"):
            books = Path(f"/proc/self/task/{thread.native_id}/schedstat")
            total_ns += int(books.read_text().split()[0])
    return total_ns / 1e9


def cost_of(*, attach: bool) -> Cost:
    """The cost of a few steps, with or without the engine."""
    model = resnet20()
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    calibration_s = timer_s() if attach else 0.0
    hooks, backend = ThreadTimer(calibration_s), ThreadTimer(calibration_s)
    x = torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(BATCH) % 10

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    def counters() -> Cost:
        inside_s = hooks.total_s - backend.total_s
        return {"hooks_s": inside_s, "backend_s": backend.total_s, "threads_s": threads_s()}

    with ExitStack() as stack:
        if attach:
            stack.enter_context(hooks.installed(ENTRIES))
            stack.enter_context(backend.installed(BACKEND))
            stack.enter_context(tw.attach(model, optimizer, tw.AllReduce()))
        train(WARM_UP_STEPS)
        return time_steps(train, STEPS, counters)


def one_worker(turns: int) -> dict[str, list[Cost]]:
    """Plain and attached steps by turns, in this process, which is in no world."""
    torch.set_num_threads(1)
    costs: dict[str, list[Cost]] = {"plain": [], "attached": []}
    for turn in range(turns):
        for name in rotated(list(costs), turn):
            costs[name].append(cost_of(attach=name == "attached"))
    return costs


def one_of_two(turns: int) -> list[Cost]:
    """Attached steps, in one of two workers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    costs = [cost_of(attach=True) for _ in range(turns)]
    dist.destroy_process_group()
    return costs


def measure(turns: int) -> dict[str, Any]:
    """Print the table, and return all costs."""
    note(f"engine cost: {turns} turns ...")
    alone = one_worker(turns)
    first, second = run_workers(2, one_of_two, turns)
    ours, plain = alone["attached"], alone["plain"]
    plain_s = [cost["processor_s"] for cost in plain]
    print(f"\n### Processor time of the engine, ResNet-20, batch {BATCH}\n")
    print_head("what", "ms per step", "share of a plain step's processor time")

    def row(name: str, seconds: Sequence[float]) -> None:
        share = statistics.median(a / b for a, b in zip(seconds, plain_s, strict=True))
        print_row(name, spread_of(seconds, scale=1e3, digits=2), f"{share:.2%}")

    row("a plain step", plain_s)
    row("difference", [cost["processor_s"] - p for cost, p in zip(ours, plain_s, strict=True)])
    row("hooks", [cost["hooks_s"] for cost in ours])
    row("threads", [cost["threads_s"] for cost in ours])
    row("hooks, 2 workers", [cost["hooks_s"] for cost in first])
    row("threads, 2 workers", [cost["threads_s"] for cost in first])
    row("starting operations, 2 workers", [cost["backend_s"] for cost in first])
    costs = {"alone, plain": plain, "alone, attached": ours, "rank 0 of 2": first, "rank 1 of 2": second}
    return {"config": {"batch": BATCH, "turns": turns, "steps": STEPS}, "costs": costs}
