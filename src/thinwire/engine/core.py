"""What a worker does, written once: reducing, mixing, serving, pausing, clipping, saving.

Nothing here waits: methods that have to, yield what to wait for, one after another. Two thin shells wait:
`Transport` in the training thread of a process, `VirtualWorker` on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine import state
from thinwire.engine.buckets import ParameterBucket, TrainingContext, local
from thinwire.engine.buffers import BufferPolicy, Buffers
from thinwire.engine.clipping import clip_parts, replica_parts
from thinwire.engine.driver import Driver, Task
from thinwire.engine.endpoint import Endpoint, Make
from thinwire.engine.forward_reducer import ForwardReducer
from thinwire.engine.leaves import Kept
from thinwire.engine.mixer import Mixer
from thinwire.engine.optimizer import is_normalised
from thinwire.engine.rate_scale import RateScale
from thinwire.engine.reducer import BackwardReducer
from thinwire.engine.refusal import Refusal
from thinwire.engine.replica_group import Ranks, ReplicaGroup
from thinwire.engine.sharded_reducer import ShardedReducer
from thinwire.engine.sparse_rows import SparseRows
from thinwire.strategies.base import Gradients, Strategy, norm_to_clip, overrides
from thinwire.traffic import Traffic
from thinwire.wire.base import Lane
from thinwire.wire.ranges import range_of
from thinwire.wire.wire import Meter, Wire
from thinwire.wire.work import Work, in_background

Order = list[tuple[int, int]]


class Shell(Protocol):
    """How a worker waits, and where its coroutines run."""

    driver: Driver
    context: TrainingContext

    def wait_for(self, works: Iterable[Work]) -> None:
        """Wait for works, one after another: the next may depend on the one before."""

    def background(self, call: Callable[[], None]) -> None:
        """Make a call beside training."""

    def agree(self, order: Order) -> Order:
        """Rank 0's order, on every worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What one worker has done so far."""

    steps: int = 0
    """Optimizer steps."""
    rounds: int = 0
    """Wire operations."""
    traffic: Traffic = field(default_factory=Traffic)
    exposed_s: float = 0.0
    """Seconds training waited for the wire with nothing else to do."""
    instruments: Mapping[str, float] = field(default_factory=dict)
    """Numbers the strategy tells of itself, by name."""

    @property
    def sent_bytes(self) -> int:
        return self.traffic.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.traffic.received_bytes

    @property
    def messages(self) -> int:
        """Messages sent."""
        return self.traffic.messages


class Core:
    """One worker: a strategy joined to a model and its optimizers."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        strategy: Strategy,
        lane: Lane,
        shell: Shell,
        *,
        buffers: BufferPolicy,
    ) -> None:
        self.model, self.optimizers, self.strategy = model, optimizers, strategy
        self.lane = lane
        self.exposed_s = 0.0
        self.meter, self.engine_meter = Meter(), Meter()
        """The strategy's traffic, and the engine's own."""
        self.engine = Endpoint(lane.lane("engine"), self.engine_meter)
        """For what a step needs."""
        self.outside = Endpoint(lane.lane("outside"), self.engine_meter)
        """For what users ask for between steps."""
        # Where replicas differ so may their buffers, and Silent must stay silent.
        policy = buffers if strategy.replicas_agree else "local"
        self.buffers = Buffers(model, policy, self.engine.lane)
        self.receiving_buffers = self.buffers.receiving
        self.sharded = False
        """Whether each worker updates a strip of its parameters only."""
        self.groups: list[ReplicaGroup] = []
        self.context, self._driver = shell.context, shell.driver
        self.wait_for, self.background, self.agree = shell.wait_for, shell.background, shell.agree
        self._endpoints: dict[Ranks, Endpoint] = {}
        self._mixes = overrides(strategy, "mix")
        self.awaited_step = 0
        """While training pauses: the step that it waits for, to which all workers must have come."""
        self._rates = RateScale(optimizers, self._rate_scale)

    def _rate_scale(self, optimizer: Optimizer) -> float:
        if not self.groups:
            return 1.0
        return self.strategy.rate_scale(self.groups[0].state, self.lane.world_size, is_normalised(optimizer))

    def assemble(
        self,
        buckets: Sequence[ParameterBucket],
        ranks: Sequence[Ranks],
        piece_bytes: int,
        rows: Sequence[SparseRows] = (),
    ) -> None:
        """Start anew with these buckets, each with the ranks of its replicas, and sparse gradients beside
        them."""
        self.buckets, self.rows = buckets, rows
        self.groups = []
        self._group_of: dict[int, ReplicaGroup] = {}
        for key in dict.fromkeys(ranks or [None]):
            mine = [bucket for bucket, each in zip(buckets, ranks, strict=True) if each == key]
            for index, bucket in enumerate(mine):
                bucket.index = index
            endpoint = self.endpoint(key)
            group = ReplicaGroup(endpoint, key, mine, self.strategy.init(mine, endpoint.wire()))
            self.groups.append(group)
            self._group_of |= {bucket.place: group for bucket in mine}
        self.refusal = Refusal(
            self.strategy, self.engine, self.context, buckets, rows, has_groups=self.has_groups
        )
        self.reducer = self._make_reducer(buckets, piece_bytes, rows)
        self.mixer = Mixer(buckets, self._mix, self._driver, self.lane.now)

    def _make_reducer(
        self, buckets: Sequence[ParameterBucket], piece_bytes: int, rows: Sequence[SparseRows]
    ) -> BackwardReducer | ForwardReducer | ShardedReducer:
        overlap = self.strategy.overlap
        if self.sharded:
            return ShardedReducer(self.model, self.optimizers, buckets, overlap, self)
        if overlap == "forward":
            return ForwardReducer(
                self.model, self.optimizers, buckets, piece_bytes, self, clock=self.lane.now
            )
        return BackwardReducer(buckets, overlap, self, rows)

    def endpoint(self, ranks: Ranks) -> Endpoint:
        """Where the replicas of some parameters meet."""
        if ranks not in self._endpoints:
            lane = self.lane if ranks is None else self.lane.lane("replicas", ranks)
            self._endpoints[ranks] = Endpoint(lane, self.meter)
        return self._endpoints[ranks]

    # -- time and numbers ---------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self.context.step - 1

    @steps.setter
    def steps(self, steps: int) -> None:
        self.context.step = steps + 1

    @property
    def has_groups(self) -> bool:
        """Whether only some workers hold copies of some parameters."""
        return any(group.ranks is not None for group in self.groups)

    @property
    def stats(self) -> Stats:
        return Stats(
            steps=self.steps,
            rounds=self.meter.rounds + self.engine_meter.rounds,
            traffic=self.meter.traffic + self.engine_meter.traffic,
            exposed_s=self.exposed_s,
            instruments=self.strategy.instruments(self.groups[0].state),
        )

    def side_lane(self, name: str, driver: Driver) -> tuple[Lane, Callable[[Make], Task]]:
        """A lane, and what starts coroutines on it, for something else that is sent beside training."""
        lane = self.engine.lane.lane(name)
        endpoint = Endpoint(lane, self.engine_meter)
        return lane, lambda make: endpoint.start(driver, "reduce", make, name)

    # -- gradients (the reducers' launcher) ---------------------------------------------------------

    def reduce(self, bucket: Gradients, place: int) -> Task:
        group = self._group_of[place]
        make: Make = partial(self.strategy.reduce, bucket, group.state)  # type: ignore[arg-type]
        if self.buckets[place].leaves:
            make = partial(_remember_and_reduce, self.buckets[place], make)
        with range_of("reduce"):
            return group.endpoint.start(self._driver, "reduce", make, f"reduce {place}")

    def reduce_rows(self, rows: SparseRows, weight: float) -> Task:
        name = f"reduce {rows.name}"
        return self.endpoint(None).start(self._driver, "reduce", partial(rows.reduce, weight), name)

    def start_reducing(self, place: int, make: Make, name: str) -> Task:
        """Start a coroutine of the engine's own among the replicas of a bucket."""
        return self._group_of[place].endpoint.start(self._driver, "reduce", make, name)

    def position(self, place: int) -> tuple[int, int]:
        """This worker's number among the replicas of a bucket, and how many these are."""
        lane = self._group_of[place].endpoint.lane
        return lane.rank, lane.world_size

    def send_buffers(self) -> None:
        self.buffers.send(lambda make, name: self.engine.start(self._driver, "reduce", make, name))

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients that the coming step uses; `reducer.reducing` must have been waited for."""
        with self.reducer.gradients():
            limit = norm_to_clip(self.strategy, max_norm, self.lane.world_size)
            if isinstance(self.reducer, ShardedReducer):
                parts = self.reducer.gradient_parts()
            elif self.has_groups:
                parts = replica_parts(self.model, self.groups, self.lane.world_size)
            else:
                return nn.utils.clip_grad_norm_(self.model.parameters(), limit, norm_type)
            return clip_parts(parts, limit, norm_type, self._gather_number)

    def _gather_number(self, mine: Tensor) -> Tensor:
        """Every worker's number, in order of rank."""
        work, everyones = self.engine.gather(mine)
        self.wait_for([work])
        return everyones

    # -- parameters -----------------------------------------------------------------------------------

    def averageable(self) -> dict[Endpoint, list[Tensor]]:
        """Floating-point tensors by where their replicas meet: all workers for buffers and frozen ones."""
        some = [group for group in self.groups if group.ranks is not None]
        meets = {
            id(p): group.endpoint for group in some for bucket in group.buckets for p in bucket.parameters
        }
        found: dict[Endpoint, list[Tensor]] = {}
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.is_floating_point():
                found.setdefault(meets.get(id(tensor), self.outside), []).append(local(tensor))
        return found

    def before_step(self) -> Iterator[Work]:
        """Refuse a step with gradients that are not finite, unless a GradScaler has told the optimizer of
        them, and bring back what is due before it."""
        if self.refusal.is_due and not any(hasattr(optimizer, "found_inf") for optimizer in self.optimizers):
            yield from self.refusal.raising()
        self.serve()
        with range_of("land"):
            yield from self.mixer.bringing_back(self.steps)
        self._rates.apply_()

    def after_step(self) -> Iterator[Work]:
        """Count an optimizer step, and start mixing."""
        self._rates.restore_()
        self.reducer.record_step()
        for bucket in self.buckets:
            bucket.commit_()
        if self._mixes:
            with range_of("mix"):
                yield from self.mixer.starting(self.context.step)
        self.context.step += 1
        self.context.samples = None

    def _mix(self, bucket: ParameterBucket) -> Task:
        group = self._group_of[bucket.place]
        mix = partial(self.strategy.mix, bucket, group.state)
        return group.endpoint.start(self._driver, "mix", mix, f"mix {bucket.place}", in_training=True)

    # -- serving and pausing --------------------------------------------------------------------------

    def serve(self) -> None:
        """Answer others, from the first step on and again after every pause; raise what went wrong there."""
        if not overrides(self.strategy, "serve"):
            return
        for group in self.groups:
            if group.serving is None:
                group.endpoint.messenger.resume()
                serve = partial(self.strategy.serve, group.state)
                group.serving = group.endpoint.start(self._driver, "serve", serve)
            if group.serving.error is not None:
                raise group.serving.error

    def synchronizing(self) -> Iterator[Work]:
        """Finish everything under way, together with all workers: steps, mixing, messages."""
        self.awaited_step = self.steps
        yield from self.reducer.stepping()
        # Messages to whoever listens are taken, however many steps that one makes.
        self.awaited_step = 0 if overrides(self.strategy, "serve") else self.mixer.newest_step
        yield from self.mixer.completing_all()
        self.awaited_step = 0
        for group in self.groups:
            if group.serving is not None:
                quiesce = group.endpoint.messenger.quiesce
                yield group.endpoint.start(self._driver, "settle", quiesce, in_training=True)
                yield group.serving
                group.serving = None
            if overrides(self.strategy, "settle"):
                settle = partial(self.strategy.settle, group.buckets, group.state)
                task = group.endpoint.start(self._driver, "mix", settle, "settle", in_training=True)
                yield from self.mixer.completing(task)

    def leaving(self) -> Iterator[Work]:
        """End what is open for good, after `synchronizing`."""
        self.reducer.give_back()
        if overrides(self.strategy, "serve"):
            for group in self.groups:
                goodbye = group.endpoint.messenger.say_goodbye
                yield group.endpoint.start(self._driver, "settle", goodbye, in_training=True)

    def abandon(self) -> None:
        """Close coroutines that will not be stepped any more."""
        self.mixer.abandon()
        for group in self.groups:
            if group.serving is not None:
                group.serving.coroutine.close()

    # -- state ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The strategy's state: leaves by parameter, and the rest by group."""
        return state.dump_all(self.strategy, self.steps, self.buckets, self._states)

    @property
    def _states(self) -> list[Any]:
        return [group.state for group in self.groups]

    def shrunken_state(self, kept: Kept, move: Callable[[dict[str, Tensor]], None]) -> dict[str, Any]:
        """The strategy's state as it is for parameters that keep only these indices; see `state.shrunken`."""
        return state.shrunken(self.state_dict(), self.buckets, kept, move)

    def load(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on with this worker's share of the states that all workers saved, in order of rank."""
        rank, world_size = self.lane.rank, self.lane.world_size
        state.check_strategy(saved, self.strategy)
        states = state.load_all(saved, self.buckets, self._states, rank, world_size)
        for group, loaded in zip(self.groups, states, strict=True):
            group.state = loaded
        self.steps = max(int(each["steps"]) for each in saved)

    def take_over(self, own: dict[str, Any] | None, giver: dict[str, Any], *, joins: bool) -> None:
        """Go on in another world, after `assemble`; see `state.take_over`."""
        state.take_over(self.strategy, self.buckets, self._states, own=own, giver=giver, joins=joins)

    def recovering(self) -> Iterator[Work]:
        """After `take_over`, together with all workers of the new world."""
        if overrides(self.strategy, "recover"):
            for group in self.groups:
                recover = partial(self.strategy.recover, group.buckets, group.state)
                task = group.endpoint.start(self._driver, "mix", recover, "recover", in_training=True)
                yield from self.mixer.completing(task)

    def restart(self) -> None:
        """The model has been replaced before training: make the strategy's state anew, and count from 0."""
        for group in self.groups:
            group.state = self.strategy.init(group.buckets, group.endpoint.wire())
        self.meter.reset()
        self.engine_meter.reset()


async def _remember_and_reduce(bucket: ParameterBucket, reduce: Make, wire: Wire) -> None:
    await in_background()
    bucket.remember_()
    await reduce(wire)
