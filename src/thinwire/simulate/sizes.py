"""Simulations of sizes alone: how long steps take and what they send, with models that hold no numbers.

Ten thousand workers fit, since none has any storage and those that are alike are played once. A strategy
whose messages depend on the data (how many numbers pass a threshold) cannot be played like this.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import SGD

from thinwire.engine.pieces import FIRST_AGREEMENT
from thinwire.errors import check
from thinwire.simulate.network import Network
from thinwire.simulate.session import Change, Session
from thinwire.simulate.wire import NotAlike
from thinwire.simulate.worker import VirtualWorker, Ways
from thinwire.strategies.base import Strategy, overrides
from thinwire.wire.base import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Paced:
    """Steps as the clock saw them, once they had become regular."""

    step_s: float
    """From one step to the next, of the slowest worker."""
    exposed_s: float
    """Of these, waiting for the wire, mean over workers."""
    sent_bytes: float
    """Per step and worker."""
    messages: float
    """Per step and worker."""


class _Learner:
    """Steps without numbers; all workers share one model, since nothing is in it."""

    clip_norm = None

    def __init__(self, host: int, model: nn.Module, optimizer: SGD, all_of_them: _Learners) -> None:
        self.model = model
        self.optimizer = optimizer
        self._host = host
        self._all = all_of_them
        self._steps = 0

    def joined(self, worker: VirtualWorker) -> None:
        pass

    def fetching(self) -> Iterator[Work]:
        return iter(())

    def settling(self) -> Iterator[Work]:
        return iter(())

    def draw(self) -> bool:
        return True

    def ask(self) -> None:
        pass

    def learn(self) -> None:
        pass

    def step(self) -> None:
        self.optimizer.step()

    def stepped(self) -> None:
        self._steps += 1
        self._all.stepped(self._host, self._steps)


@dataclass(slots=True)
class _Mark:
    """What all workers had done when each had ended a certain step."""

    ended_s: float = 0.0
    """Of the last one."""
    exposed_s: float = 0.0
    sent_bytes: int = 0
    messages: int = 0


class _Learners:
    def __init__(self, shapes: Sequence[tuple[int, ...]], count: int) -> None:
        parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
        self._model = nn.Module()
        for index, parameter in enumerate(parameters):
            self._model.register_parameter(f"p{index}", parameter)
        optimizer = SGD([nn.Parameter(torch.zeros(()))], lr=0.0)  # of nothing: there are no numbers to step
        self._learners = [_Learner(host, self._model, optimizer, self) for host in range(count)]
        self.session: Session | None = None
        self.marks: dict[int, _Mark] = {}
        """By number of steps."""

    def of(self, host: int) -> _Learner:
        return self._learners[host]

    def change(self, change: Change) -> None:
        pass

    def stepped(self, host: int, steps: int) -> None:
        mark = self.marks.get(steps)
        if mark is not None:
            assert self.session is not None
            stats = self.session.stats(host)
            count = self.session.stands_for(host)
            mark.ended_s = self.session.clock.now_s
            mark.exposed_s += count * stats.exposed_s
            mark.sent_bytes += count * stats.sent_bytes
            mark.messages += count * stats.messages


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's garbage collector: it would go through thousands of workers over and over."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def pace(
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    strategy: Strategy,
    ways: Ways,
    *,
    steps: int = 10,
    jitter: float = 0.0,
) -> Paced:
    """Play `steps` regular steps of a model with parameters of these shapes, after a few to get going.

    Workers of equal speed that only meet in collectives of everybody do the same at the same time. So one of
    them is played for all; where a strategy turns out to do something else, each of them.
    """
    check(steps >= 1, "steps", "at least 1", steps)
    if not jitter and not network.description.faults and not overrides(strategy, "serve"):
        with suppress(NotAlike):
            return _pace(shapes, network, strategy, replace(ways, alike=True), steps, jitter)
    return _pace(shapes, network, strategy, ways, steps, jitter)


def _pace(
    shapes: Sequence[tuple[int, ...]],
    network: Network,
    strategy: Strategy,
    ways: Ways,
    steps: int,
    jitter: float,
) -> Paced:
    network.rest()
    # the order of pieces is as good as it gets once it was agreed on for the second time
    ordered = 2 * FIRST_AGREEMENT - 1 if strategy.overlap == "forward" else 0
    warm_up = max(ordered, strategy.adapts_in) + 2
    count = len(network.description.hosts)
    learners = _Learners(shapes, count)
    with _uncollected():
        learners.session = session = Session(network, strategy, learners, ways, jitter=jitter)
        before, after = _Mark(), _Mark()
        learners.marks = {warm_up: before, warm_up + steps: after}
        session.num_steps = warm_up + steps
        session.epoch()
    worker_steps = count * steps
    return Paced(
        step_s=(after.ended_s - before.ended_s) / steps,
        exposed_s=(after.exposed_s - before.exposed_s) / worker_steps,
        sent_bytes=(after.sent_bytes - before.sent_bytes) / worker_steps,
        messages=(after.messages - before.messages) / worker_steps,
    )
