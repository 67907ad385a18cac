"""Simulations of sizes alone: step times and traffic, with models that hold no numbers.

Ten thousand workers fit, since none has any storage and those that are alike are played once. A strategy
whose messages depend on the data (how many numbers pass a threshold) cannot be played like this.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from thinwire.engine.pieces import FIRST_AGREEMENT
from thinwire.errors import check
from thinwire.hosts.description import describe
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.session import Session
from thinwire.simulate.worker import Learner
from thinwire.strategies.base import Strategy, overrides
from thinwire.traffic import Traffic
from thinwire.wire.local import NotAlike

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
_WINDOW = 16
"""Regular steps that `step_ends` plays at least."""
SUMMED = ("exposed_s", "sent_bytes", "messages")


def _still(parameters: list[nn.Parameter]) -> Optimizer:
    """An SGD that makes no steps; making a real one imports torch's compiler, which takes a second."""
    optimizer = SGD.__new__(SGD)
    numbers = dict.fromkeys(("lr", "momentum", "dampening", "weight_decay"), 0.0)
    switches = dict.fromkeys(("nesterov", "maximize", "foreach", "differentiable", "fused"), False)
    defaults = {**numbers, **switches}
    group = {"params": parameters, **defaults}
    still = {"param_groups": [group], "defaults": defaults, "state": {}, "step": lambda closure=None: None}
    optimizer.__dict__.update(still)
    return optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Regular steps as the clock saw them."""

    step_s: float
    """Seconds from one step to the next on the slowest worker."""
    exposed_s: float
    """Seconds of each step spent waiting for the wire, mean over workers."""
    sent_bytes: float
    messages: float
    """Messages per step and worker, as `sent_bytes`."""
    held_bytes: int = 0
    """Memory of one worker's buckets, and of what the strategy keeps beside the model."""


class _Learner(Learner):
    def __init__(self, model: nn.Module, optimizer: Optimizer, stepped: Callable[[int], None]) -> None:
        self.model, self.optimizer = model, optimizer
        self._stepped, self._steps = stepped, 0

    def stepped(self) -> None:
        self._steps += 1
        self._stepped(self._steps)


class _Simulation:
    """Steps up to the last of `marks`, of workers that share one model, and their totals after each of these.

    Workers of one kind that only meet in collectives of everybody, or in exchanges that look the same to all,
    do the same at the same time. So one of them is played for all; where a strategy turns out to do something
    else, each of them.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        network: Network,
        strategy: Strategy,
        model: ComputeModel,
        marks: Sequence[int],
        *,
        jitter: float = 0.0,
        dtype: torch.dtype = torch.float32,
        make_optimizer: MakeOptimizer = _still,
    ) -> None:
        may_be_alike = not (jitter or network.description.faults or overrides(strategy, "serve"))
        for alike in (True, False) if may_be_alike else (False,):
            empty = nn.ParameterList(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
            optimizer = make_optimizer([nn.Parameter(torch.zeros(()))])  # there are no numbers to step
            self._learned = empty, optimizer
            self.marks = {steps: dict.fromkeys(("ended_s", *SUMMED), 0.0) for steps in marks}
            """Totals of all workers when each had ended a certain step, the last of them at `ended_s`."""
            with suppress(NotAlike):
                self.session = Session(network, strategy, self, replace(model, alike=alike), jitter=jitter)
                self.session.num_steps = marks[-1]
                self.session.epoch()
                break

    def of(self, host: int) -> _Learner:
        return _Learner(*self._learned, partial(self._stepped, host))

    def change(self, hosts: tuple[int, ...], joined: Collection[int], furthest: int) -> None:
        pass

    def held_bytes(self) -> int:
        """Memory of the first worker's buckets and of its strategy's tensors."""
        buckets = self.session.worker(self.session.hosts[0]).core.buckets
        leaves = sum(leaf.data.nbytes for bucket in buckets for leaf in bucket.leaves.values())
        return leaves + sum(bucket.gradient.nbytes for bucket in buckets)

    def _stepped(self, host: int, steps: int) -> None:
        if steps in self.marks:
            mark, stats, count = self.marks[steps], self.session.stats(host), self.session.acts_for(host)
            mark["ended_s"] = self.session.clock.now_s
            for name in SUMMED:
                mark[name] += count * getattr(stats, name)


def _warm_up(strategy: Strategy) -> int:
    """Number of steps after which a strategy does the same in every period."""
    # the order of pieces is as good as it gets once it was agreed on for the second time
    ordered = 2 * FIRST_AGREEMENT - 1 if strategy.overlap == "forward" else 0
    return max(ordered, strategy.adapts_in) + 2


def _play(
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    strategy: Strategy,
    model: ComputeModel,
    marks: Sequence[int],
    *,
    jitter: float = 0.0,
    make_optimizer: MakeOptimizer = _still,
) -> _Simulation:
    collects = gc.isenabled()
    gc.disable()  # it would go through thousands of workers over and over
    try:
        return _Simulation(
            shapes, network, strategy, model, marks, jitter=jitter, make_optimizer=make_optimizer
        )
    finally:
        if collects:
            gc.enable()


def step_times(
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    strategy: Strategy,
    model: ComputeModel,
    *,
    steps: int = 10,
    jitter: float = 0.0,
) -> StepTimes:
    """Play at least `steps` regular steps of a model with these shapes, in whole periods of the strategy."""
    check(steps >= 1, "steps", "at least 1", steps)
    steps = -(-steps // strategy.period) * strategy.period
    warm_up = _warm_up(strategy)
    simulation = _play(shapes, network, strategy, model, (warm_up, warm_up + steps), jitter=jitter)
    before, after = simulation.marks.values()
    worker_steps = len(network.description.hosts) * steps
    means = {name: (after[name] - before[name]) / worker_steps for name in SUMMED}
    step_s = (after["ended_s"] - before["ended_s"]) / steps
    return StepTimes(step_s=step_s, held_bytes=simulation.held_bytes(), **means)


def step_ends(
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    strategy: Strategy,
    model: ComputeModel,
    steps: Sequence[int],
    make_optimizer: MakeOptimizer = _still,
) -> list[float]:
    """When each of these steps ends, in seconds from the start of training; `steps` ascend.

    Played are the steps in which the strategy still changes what it does (a warm-up, say), and some periods
    after them, whose pace the later ones keep. `make_optimizer` is as for `traffic`.
    """
    check(bool(steps) and steps[0] >= 1, "steps", "some, from 1 on", list(steps))
    window = -(-_WINDOW // strategy.period) * strategy.period
    regular_from = _warm_up(strategy)
    played = min(steps[-1], regular_from + window)
    marks = sorted({regular_from, played, *(step for step in steps if step < played)} - {0})
    marks = [mark for mark in marks if mark <= played]
    simulation = _play(shapes, network, strategy, model, marks, make_optimizer=make_optimizer)
    ended = {step: mark["ended_s"] for step, mark in simulation.marks.items()}
    step_s = (ended[played] - ended[regular_from]) / window if played == regular_from + window else 0.0
    return [ended[step] if step <= played else ended[played] + (step - played) * step_s for step in steps]


def traffic(
    shapes: Sequence[tuple[int, ...]],
    world_size: int,
    strategy: Strategy,
    *,
    steps: int,
    bucket_bytes: int | None = None,
    dtype: torch.dtype = torch.float32,
    make_optimizer: MakeOptimizer = _still,
) -> list[Traffic]:
    """The strategy's own traffic in its first steps, by worker: its coroutines are played with sizes alone.

    `make_optimizer` says which averages (momentum, Adam's moments) a strategy can send along.
    """
    network = Network(describe(hosts=world_size, rate="1gbit"))
    model = ComputeModel.of(1.0, bucket_bytes=bucket_bytes)
    simulate = partial(_Simulation, dtype=dtype, make_optimizer=make_optimizer)
    session = simulate(shapes, network, strategy, model, (steps,)).session
    return [session.worker(host).core.meter.traffic for host in session.hosts]
