"""One worker on the clock: what attach, the link and the training loop are in a process of its own.

The engine's own parts do the work (buckets, reducer, mixer, buffers), and the strategy's own coroutines
run. Only waiting is different: here it is the clock that passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from thinwire.engine import state
from thinwire.engine.attach import buckets_for
from thinwire.engine.buffers import Buffers
from thinwire.engine.deferred import Deferred
from thinwire.engine.driver import Driver, Task
from thinwire.engine.mixer import Mixer
from thinwire.engine.reducer import Reducer
from thinwire.simulate.clock import Clock
from thinwire.simulate.pace import Compute, Pace, Timetable
from thinwire.strategies.base import Gradients, Strategy, norm_to_clip, overrides
from thinwire.traffic import Traffic
from thinwire.wire.base import Wire, Work
from thinwire.wire.metered import Meter, MeteredWire


class Learner(Protocol):
    """What one worker trains."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def clip_norm(self) -> float | None: ...

    def joined(self, worker: VirtualWorker) -> None:
        """This worker trains it from now on."""
        ...

    def fetching(self) -> Iterator[Work]:
        """Wait for those samples of the next batch that other workers send."""
        ...

    def settling(self) -> Iterator[Work]:
        """Wait for everything that other workers have sent on its way."""
        ...

    def draw(self) -> bool:
        """Take the next batch; False when there is none left."""
        ...

    def ask(self) -> None:
        """The parameters are now what that batch meets."""
        ...

    def learn(self) -> None:
        """Leave the gradients of that batch in the parameters."""
        ...

    def step(self) -> None:
        """Let the optimizer step."""
        ...

    def stepped(self) -> None:
        """A step is over."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """How all workers of a simulation compute and send."""

    compute: Compute
    shares: tuple[float, ...] | None = None
    """Each trainable parameter's part of the computing time; None: its part of all parameters."""
    bucket_bytes: int | None = None
    """None: what `attach` would take."""
    alike: bool = False
    """Whether one worker stands in for all others of its speed; only with sizes."""


@dataclass(slots=True)
class Stage:
    """What the workers of one world share."""

    clock: Clock
    ways: Ways
    stepped: Callable[[VirtualWorker], None]
    """Told after every step of every worker."""
    orders: list[list[tuple[int, int]]] = field(default_factory=list)
    """In which pieces go out under overlap="forward", one after another as somebody has worked them out."""


class VirtualWorker:
    """A strategy joined to one learner, on one host."""

    def __init__(
        self, strategy: Strategy, wire: Wire, learner: Learner, pace: Pace, stage: Stage, *, steps: int = 0
    ) -> None:
        self.rank = wire.rank
        self.steps = steps
        self.exposed_s = 0.0
        self.stop_at = math.inf
        """Steps after which to pause."""
        self._strategy, self._learner, self._pace, self._stage = strategy, learner, pace, stage
        self._clock, self._compute = stage.clock, stage.ways.compute
        self._driver = Driver(stage.clock.soon)
        self._meter, self._engine_meter = Meter(), Meter()
        self._wire = MeteredWire(wire, self._meter)
        self._engine = MeteredWire(wire.lane("engine"), self._engine_meter)
        named = [(name, p) for name, p in learner.model.named_parameters() if p.requires_grad]
        self._buckets, bucket_bytes = buckets_for(
            named, learner.optimizer, strategy, wire.world_size, stage.ways.bucket_bytes
        )
        self._timetable = _timetable([(name, p.numel()) for name, p in named], self._buckets, stage.ways)
        self._buffers = Buffers(learner.model, "rank0" if strategy.replicas_agree else "local", self._engine)
        self.state = strategy.init(self._buckets, self._wire)
        self._reducer: Reducer | Deferred
        if strategy.overlap == "forward":
            self._reducer = Deferred(
                learner.model,
                learner.optimizer,
                self._buckets,
                bucket_bytes,
                self,
                clock=lambda: stage.clock.now_s,
            )
            self._reducer.foresee([bucket for bucket, _ in self._timetable.needs])
        else:
            self._reducer = Reducer(self._buckets, strategy.overlap, self)
        settle = self._settle if overrides(strategy, "settle") else None
        self._mixer = Mixer(self._buckets, self._mix, settle, self._driver, self._wire.now)
        self._announces = strategy.overlap != "none"
        self._passes = 0
        self._num_agreed = 0
        self._slower = 1.0
        self._serving: Task | None = None
        if overrides(strategy, "serve"):
            self._serving = self._start(strategy.serve(self.state, self._wire), "serve")
        learner.joined(self)

    @property
    def traffic(self) -> Traffic:
        return self._meter.traffic + self._engine_meter.traffic

    @property
    def rounds(self) -> int:
        return self._meter.rounds + self._engine_meter.rounds

    @property
    def instruments(self) -> Mapping[str, float]:
        return self._strategy.instruments(self.state)

    def beside(self, name: str) -> tuple[Wire, Callable[[Coroutine[Any, Any, None]], Task]]:
        """A lane, and what drives coroutines on it, for what else is sent beside training."""
        return self._engine.lane(name), lambda coroutine: self._start(coroutine, name)

    def resume(self, saved: list[Any]) -> None:
        """Go on with this worker's share of the states that other workers had."""
        resized = self._strategy.resize(saved, self.rank, self._wire.world_size)
        self.state = state.load(self.state, resized)

    # -- the training loop --------------------------------------------------------------------------

    def train(self) -> Task:
        """Start going through the batches of an epoch; the task ends when there are none left."""
        return self._start(self._train(), f"worker {self.rank}")

    async def _train(self) -> None:
        while self.steps < self.stop_at and await self._forward():
            await self._backward()
            await self._step()
        await self._await_all(self._settling())

    async def _forward(self) -> bool:
        """Whether there was a batch."""
        if self._pace.stopped_until_s > self._clock.now_s:
            await self._clock.sleep(self._pace.stopped_until_s - self._clock.now_s)
        await self._await_all(self._learner.fetching())
        if not self._learner.draw():
            return False
        self._slower = self._pace.draw()
        forward_s, over = self._compute.forward_s * self._slower, 0.0
        if isinstance(self._reducer, Deferred):
            for bucket, share in self._timetable.needs:
                await self._clock.sleep((share - over) * forward_s)
                over = share
                await self._await_all(self._reducer.needing([bucket]))
        self._learner.ask()
        await self._clock.sleep((1 - over) * forward_s)
        return True

    async def _backward(self) -> None:
        await self._clock.moment()  # so that others who come now learn together with this one
        self._learner.learn()
        backward_s = self._compute.backward_s * self._slower
        if not overrides(self._strategy, "reduce"):
            await self._clock.sleep(backward_s)
            return
        self._reducer.backward_begins()
        stops = [0.0]
        # The first pass only counts gradients, and announces no bucket.
        if self._announces and self._passes > 0:
            stops += self._timetable.full
        self._passes += 1
        for index, (over, share) in enumerate(pairwise(stops)):
            await self._clock.sleep((share - over) * backward_s)
            self._reducer.bucket_is_full(index)
        await self._clock.sleep((1.0 - stops[-1]) * backward_s)
        if isinstance(self._reducer, Deferred):
            self._reducer.backward_ends()
        else:
            await self._await_all(self._reducer.finishing())

    async def _step(self) -> None:
        if self._learner.clip_norm is not None:
            await self._await_all(self._reducer.reducing())
            with self._reducer.gradients():
                limit = norm_to_clip(self._strategy, self._learner.clip_norm, self._wire.world_size)
                nn.utils.clip_grad_norm_(self._learner.model.parameters(), limit)
        if self._serving is not None and self._serving.error is not None:
            raise self._serving.error
        await self._await_all(self._mixer.landing(self.steps))
        self._learner.step()
        self._reducer.record_step()
        self.steps += 1
        if overrides(self._strategy, "mix"):
            await self._await_all(self._mixer.launching(self.steps))
        self._learner.stepped()
        self._stage.stepped(self)

    def _settling(self) -> Iterator[Work]:
        if isinstance(self._reducer, Deferred):
            yield from self._reducer.needing(range(len(self._buckets)))
        yield from self._mixer.finishing()
        yield from self._learner.settling()

    # -- what the reducer asks (its Launcher) -------------------------------------------------------

    def reduce(self, bucket: Gradients) -> Task:
        return self._start(self._strategy.reduce(bucket, self.state, self._wire), f"reduce {bucket.index}")

    def send_buffers(self) -> None:
        self._buffers.send(self._start)

    def receiving_buffers(self) -> Iterator[Work]:
        return self._buffers.receiving()

    def wait_for(self, works: Iterable[Work]) -> None:
        for work in works:
            assert work.done(), "on the clock nothing blocks: what is needed was waited for before"
            work.wait()

    def soon(self, call: Callable[[], None]) -> None:
        self._clock.soon(call)

    def agree(self, order: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The order of whoever comes first; on the clock, agreeing takes no message."""
        if self._num_agreed == len(self._stage.orders):
            self._stage.orders.append(order)
        self._num_agreed += 1
        return self._stage.orders[self._num_agreed - 1]

    def _mix(self, bucket: Any) -> Task:
        return self._start(self._strategy.mix(bucket, self.state, self._wire), f"mix {bucket.index}")

    def _settle(self) -> Task:
        return self._start(self._strategy.settle(self._buckets, self.state, self._wire), "settle")

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> Task:
        return self._driver.start(coroutine, name)

    async def _await_all(self, works: Iterable[Work]) -> None:
        """One after another; the time that passes is exposed."""
        for work in works:
            began_s = self._clock.now_s
            await work
            self.exposed_s += self._clock.now_s - began_s


def _timetable(named: list[tuple[str, int]], buckets: Any, ways: Ways) -> Timetable:
    place = {name: index for index, (name, _) in enumerate(named)}
    shares = ways.shares or tuple(float(numel) for _, numel in named)
    assert len(shares) == len(named), "one share for each trainable parameter"
    return Timetable(shares, [[place[name] for name in bucket.names] for bucket in buckets])
