"""One worker on the virtual clock: the engine's core in a training loop whose waiting takes virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thinwire.engine.buckets import TrainingContext
from thinwire.engine.core import Core, Order
from thinwire.engine.cut import cut
from thinwire.engine.driver import Driver, Task
from thinwire.engine.forward_reducer import ForwardReducer
from thinwire.engine.reducer import BackwardReducer
from thinwire.simulate.clock import Clock, ComputeModel, Pace, timetable
from thinwire.strategies.base import Strategy, overrides
from thinwire.wire.base import Lane
from thinwire.wire.work import Work


class Learner:
    """What one worker trains; what is not overridden trains nothing, for ever."""

    model: nn.Module
    optimizer: Optimizer
    clip_norm: float | None = None

    def joined(self, worker: VirtualWorker) -> None:
        """This worker trains it from now on."""

    def fetching(self) -> Iterator[Work]:
        """Wait for those samples of the next batch that other workers send."""
        return iter(())

    def settling(self) -> Iterator[Work]:
        """Wait for everything that other workers have sent on its way."""
        return iter(())

    def draw(self) -> bool:
        """Take the next batch; False when there is none left."""
        return True

    def ask(self) -> None:
        """The parameters are now what that batch meets."""

    def learn(self) -> None:
        """Leave the gradients of that batch in the parameters."""

    def step(self) -> None:
        self.optimizer.step()

    def stepped(self) -> None:
        """A step is over."""


@dataclass(slots=True)
class Stage:
    """What the workers of one world share."""

    clock: Clock
    model: ComputeModel
    stepped: Callable[[VirtualWorker], None]
    """Called after every step of every worker."""
    orders: list[Order] = field(default_factory=list)
    """Orders of pieces under overlap="forward", as the first worker to come has worked them out."""


class VirtualWorker:
    """A strategy joined to one learner, on one host."""

    def __init__(
        self,
        strategy: Strategy,
        lane: Lane,
        learner: Learner,
        pace: Pace,
        stage: Stage,
        *,
        after: int | None = None,
    ) -> None:
        """`after`: the steps done when the world has changed; `take_over` comes before training then."""
        self.rank = lane.rank
        self.stop_at = math.inf
        """Steps after which to pause."""
        self._strategy, self._learner, self._pace, self._stage = strategy, learner, pace, stage
        self._clock, self._model = stage.clock, stage.model
        self.driver = Driver(stage.clock.soon, stage.clock.soon)
        self.context = TrainingContext(step=(after or 0) + 1)
        self.core = Core(learner.model, [learner.optimizer], strategy, lane, self, buffers="rank0")
        cut(self.core, {}, self._model.bucket_bytes)
        sizes = {name: p.numel() for name, p in learner.model.named_parameters() if p.requires_grad}
        shares = self._model.shares or tuple(sizes.values())
        assert len(shares) == len(sizes), "one share for each trainable parameter"
        place = {name: index for index, name in enumerate(sizes)}
        buckets = [[place[name] for name in bucket.names] for bucket in self.core.buckets]
        self._full, self._needs = timetable(shares, buckets)
        self._reducer = self.core.reducer
        if isinstance(self._reducer, ForwardReducer):
            self._reducer.foresee([bucket for bucket, _ in self._needs])
        self._bytes = [bucket.gradient.nbytes for bucket in self.core.buckets]
        self._selecting: list[Work] = []
        self._selected_s = 0.0
        self._num_passes = self._num_agreed = 0
        self._slowdown = 1.0
        self._recovers = after is not None
        """Whether workers have yet to come to what they have in common."""
        if not self._recovers:
            self.core.serve()
        learner.joined(self)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands between two epochs."""
        return {"core": self.core.state_dict(), "num_passes": self._num_passes}

    def load_state_dict(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on from there, with the states of all workers in order of rank."""
        self.core.load([each["core"] for each in saved])
        self._num_passes = saved[self.rank]["num_passes"]

    def take_over(self, own: dict[str, Any] | None, giver: dict[str, Any]) -> None:
        """Go on in a world of other workers, as `engine/regroup.py` does: with this worker's own state, if it
        was there before, and what all have in common from the one that has come furthest."""
        self.core.take_over(own, giver, joins=own is None)

    def train(self) -> Task:
        """Start going through the batches of an epoch; the task ends when there are none left."""
        return self.driver.start(self._train(), f"worker {self.rank}")

    async def _train(self) -> None:
        if self._recovers:
            self._recovers = False
            await self._await_all(self.core.recovering())
            self.core.serve()
        while self.core.steps < self.stop_at and await self._forward():
            await self._backward()
            await self._step()
        await self._await_all(self.core.synchronizing())
        await self._await_all(self._learner.settling())

    async def _forward(self) -> bool:
        """Gives whether there was a batch."""
        if (stopped_s := self._pace.stopped_until_s - self._clock.now_s) > 0:
            await self._clock.sleep(stopped_s)
        await self._await_all(self._learner.fetching())
        if not self._learner.draw():
            return False
        self._slowdown = self._pace.draw()
        forward_s, over = self._model.forward_s * self._slowdown, 0.0
        if isinstance(self._reducer, ForwardReducer):
            optimizer_s = self._model.optimizer_s * self._slowdown / sum(self._bytes)
            for bucket, share in self._needs:
                await self._clock.sleep((share - over) * forward_s)
                over = share
                await self._await_all(self._reducer.needing([bucket]))
                await self._clock.sleep(optimizer_s * self._bytes[bucket])
        self._learner.ask()
        await self._clock.sleep((1 - over) * forward_s)
        return True

    async def _backward(self) -> None:
        await self._clock.moment()  # so that others who come now learn together with this one
        self._learner.learn()
        backward_s = self._model.backward_s * self._slowdown
        if not overrides(self._strategy, "reduce"):
            await self._clock.sleep(backward_s)
            return
        self._reducer.backward_begins()
        # The first pass only counts gradients, and announces no bucket.
        announces = self._strategy.overlap != "none" and self._num_passes > 0
        stops = [0.0, *(self._full if announces else ())]
        self._num_passes += 1
        for index, (over, share) in enumerate(pairwise(stops)):
            await self._clock.sleep((share - over) * backward_s + self._model.copy_s * self._bytes[index])
            self._select(index)
        await self._clock.sleep((1.0 - stops[-1]) * backward_s)
        if not announces and (self._model.copy_s or self._model.select_s):
            await self._clock.sleep((self._model.copy_s + self._model.select_s) * sum(self._bytes))
        await self._await_all(self._selecting)
        self._selecting = []
        if isinstance(self._reducer, BackwardReducer):
            await self._await_all(self._reducer.finishing())
        else:
            self._reducer.backward_ends()
        if self._model.copy_s:
            await self._clock.sleep(self._model.copy_s * sum(self._bytes))

    def _select(self, index: int) -> None:
        """Announce a full bucket, when the largest of its numbers have been found if that takes time."""
        if not self._model.select_s:
            self._reducer.bucket_is_full(index)
            return
        self._selected_s = (
            max(self._selected_s, self._clock.now_s) + self._model.select_s * self._bytes[index]
        )
        self._clock.at(self._selected_s, partial(self._reducer.bucket_is_full, index))
        self._selecting.append(self._clock.sleep(self._selected_s - self._clock.now_s))

    async def _step(self) -> None:
        if self._learner.clip_norm is not None:
            await self._await_all(self._reducer.reducing())
            self.core.clip_grad_norm(self._learner.clip_norm)
        await self._await_all(self.core.before_step())
        if self._model.optimizer_s and not isinstance(self._reducer, ForwardReducer):
            await self._clock.sleep(self._model.optimizer_s * self._slowdown)
        self._learner.step()
        await self._await_all(self.core.after_step())
        self._learner.stepped()
        self._stage.stepped(self)

    async def _await_all(self, works: Iterable[Work]) -> None:
        """One after another; the time that passes is exposed."""
        for work in works:
            began_s = self._clock.now_s
            await work
            self.core.exposed_s += self._clock.now_s - began_s

    def wait_for(self, works: Iterable[Work]) -> None:
        for work in works:
            assert work.done(), "on the clock nothing blocks: what is needed was waited for before"
            work.wait()

    def background(self, call: Callable[[], None]) -> None:
        self._clock.soon(call)

    def agree(self, order: Order) -> Order:
        """The order of whoever comes first; on the clock, agreeing takes no message."""
        if self._num_agreed == len(self._stage.orders):
            self._stage.orders.append(order)
        self._num_agreed += 1
        return self._stage.orders[self._num_agreed - 1]
