"""Workers of one thread: the engine's core under one strategy, stepped in turn, without a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.optim import SGD

from tests.inline import Inline
from thinwire.engine.buckets import ParameterBucket, TrainingContext
from thinwire.engine.core import Core, Order
from thinwire.engine.driver import Driver, Task
from thinwire.strategies.base import Strategy
from thinwire.wire.base import Lane
from thinwire.wire.work import Work

SMALL = 10
"""Parameters with at most this many numbers arrive exact."""


class InlineShell:
    """Waits for nothing: what is needed has ended, or is waited for by a coroutine."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.context = driver, TrainingContext()

    def wait_for(self, works: Iterable[Work]) -> None:
        for work in works:
            assert work.done(), "nothing blocks in one thread"
            work.wait()

    def background(self, call: Callable[[], None]) -> None:
        call()

    def agree(self, order: Order) -> Order:
        return order


def make_core(
    strategy: Strategy,
    lane: Lane,
    inline: Inline,
    buckets: Sequence[Sequence[Tensor]],
    rate: Callable[[], float | None] = lambda: None,
) -> Core:
    """A worker whose model has a copy of each of these tensors as a parameter, in these buckets."""
    model = nn.ParameterDict(
        {
            f"{place}-{number}": nn.Parameter(data.clone())
            for place, tensors in enumerate(buckets)
            for number, data in enumerate(tensors)
        }
    )
    optimizer, shell = SGD(model.parameters(), lr=0.0), InlineShell(inline.driver)
    core = Core(model, [optimizer], strategy, lane, shell, buffers="local")
    made = []
    for place, tensors in enumerate(buckets):
        names = [f"{place}-{number}" for number in range(len(tensors))]
        made.append(ParameterBucket(place, names, [model[name] for name in names], SMALL, shell.context))
        made[-1].read_rate = rate
    core.assemble(made, [None] * len(made), piece_bytes=1)
    core.serve()
    return core


def waiting(inline: Inline, core: Core, works: Iterable[Work]) -> Task:
    """Wait for works of a worker one after another, in a coroutine."""

    async def wait() -> None:
        for work in works:
            await work

    return inline.driver.start(wait(), f"worker {core.lane.rank}")
