"""AutoStrategy: exact SGD while it measures, then what the planner recommends, reconsidered at intervals."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.errors import check
from thinwire.hosts.quantities import HIGHEST_BIT_PER_S, LOWEST_BIT_PER_S
from thinwire.planner.accuracy import expected
from thinwire.planner.auto_timing import StepTimer, measure_wire
from thinwire.planner.cluster import Cluster, ClusterHost
from thinwire.planner.predict import Planner
from thinwire.planner.workload import FORWARD_SHARE, Workload
from thinwire.strategies import registry
from thinwire.strategies.base import SAME, Bucket, Strategy, overrides
from thinwire.strategies.local.base import LocalState
from thinwire.strategies.settings import check_types
from thinwire.strategies.sparse.state import SparseState
from thinwire.units import as_rate, as_seconds
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, training_thread

OPTIONS = ("all-reduce", "gossip-grad", "gossip-grad:share=0.1", "trickle", "gtopk")
"""What it can pick; the first is exact SGD, with which it begins. The last two share their
residuals, which are empty whenever one of them begins."""
EQUAL = 0.05
"""Speeds that differ by less than this share count as equal."""
WRONG = 1.1
"""A pick is taken back if its steps take so many times those of the one before."""
CHANGED = 2.0
"""Another bandwidth by this factor: what was found to be wrong may be right now."""

_log = logging.getLogger("thinwire")


@dataclass(slots=True)
class AutoState:
    """One worker's state; lists are in the order of `OPTIONS`."""

    states: list[Any]
    """The state of each option; they are kept while another is used."""
    pick: int = field(default=0, metadata=SAME)
    before: int = field(default=0, metadata=SAME)
    """The pick before this one."""
    flushing: bool = field(default=False, metadata=SAME)
    """Whether the next gradients take leftover residuals with them, exactly."""
    banned: list[bool] = field(default_factory=lambda: [False] * len(OPTIONS), metadata=SAME)
    """Options that turned out to be slower than predicted on a wire like this."""
    steps_s: list[float] = field(default_factory=lambda: [0.0] * len(OPTIONS), metadata=SAME)
    """Seconds of a step as last measured; 0: not yet."""
    optimizer_s: float = field(default=0.0, metadata=SAME)
    """Seconds of the optimizer's step, as last measured where nothing is brought back before it."""
    bit_per_s: float = field(default=0.0, metadata=SAME)
    switches: int = field(default=0, metadata=SAME)
    timer: StepTimer = field(default_factory=StepTimer, init=False, repr=False)
    buckets: Sequence[Bucket] = field(default=(), init=False, repr=False)
    ready: Work = field(default_factory=Work, init=False, repr=False)
    leaving: int | None = field(default=None, init=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoStrategy(Strategy):
    """Measure the first steps, ask the planner, and use the fastest strategy within an accuracy budget.

    All workers take the slowest measurement of all, and the pick of the first. On leaving a strategy whose
    workers differ, all take the mean of their parameters; on leaving one with residuals, these go with the
    next gradients, exactly. So nothing is lost on a switch.
    """

    accuracy_budget: float = 0.5
    """Points of accuracy that may be lost, by the planner's table of measured trainings."""
    measure_steps: int = 8
    """Steps of exact SGD before the first pick."""
    reconsider_every: int = 50
    """Steps between two considerations after that."""

    def __post_init__(self) -> None:
        check_types(self)
        name = "AutoStrategy"
        check(self.accuracy_budget >= 0, f"{name}.accuracy_budget", "0 or more points", self.accuracy_budget)
        check(self.measure_steps >= 4, f"{name}.measure_steps", "4 or more steps", self.measure_steps)
        check(
            self.reconsider_every >= 4, f"{name}.reconsider_every", "4 or more steps", self.reconsider_every
        )

    @property
    def period(self) -> int:
        return self.reconsider_every

    @property
    def adapts_in(self) -> int:
        return self.measure_steps + 1

    def init(self, buckets: Sequence[Bucket], wire: Wire) -> AutoState:
        state = AutoState([option.init(buckets, wire) for option in _options()])
        state.buckets = buckets
        for each in state.states:
            if isinstance(each, LocalState):
                each.backlogs = _residuals(state)
        return state

    def rate_scale(self, state: AutoState, world_size: int, normalised: bool) -> float:
        return _options()[state.pick].rate_scale(state.states[state.pick], world_size, normalised)

    async def reduce(self, bucket: Bucket, state: AutoState, wire: Wire) -> None:
        if bucket.index == len(state.buckets) - 1:
            state.timer.full(wire.now())
        option = _options()[state.pick]
        if state.flushing and wire.world_size > 1:
            residual = _residuals(state)[bucket.index]
            bucket.gradient[: bucket.exact_from].add_(residual)
            residual.zero_()
            option = _options()[0]
        if overrides(option, "reduce"):
            await option.reduce(bucket, state.states[_options().index(option)], wire)
            state.timer.reduced_s = wire.now()

    async def mix(self, bucket: Bucket, state: AutoState, wire: Wire) -> None:
        if wire.world_size == 1:
            return
        if bucket.index == 0:
            state.ready = Work()
            state.flushing, state.leaving = False, None
            state.timer.stepped(wire.now())
            after = bucket.step - self.measure_steps
            if after >= 0 and after % self.reconsider_every == 0:
                await self._consider(state, wire)
            state.ready.finish()
        await state.ready
        if state.leaving is not None:
            await self._leave(bucket, state, state.leaving, wire)
        option, own = _options()[state.pick], state.states[state.pick]
        if state.leaving is not None and isinstance(own, LocalState):
            own.anchors[bucket.index].copy_(bucket.read())  # its first round is the next step's
        elif overrides(option, "mix"):
            await option.mix(bucket, own, wire)

    async def _leave(self, bucket: Bucket, state: AutoState, index: int, wire: Wire) -> None:
        """All workers take the mean of their parameters, where the strategy they leave let these differ."""
        if not overrides(_options()[index], "mix"):
            return
        mean, left = bucket.read(), state.states[index]
        if isinstance(left, LocalState):  # changes of all that were not passed on yet
            residual = _residuals(state)[bucket.index]
            mean[: residual.numel()].add_(residual)
            residual.zero_()
        await wire.all_reduce_(mean)
        mean.div_(wire.world_size)
        if isinstance(left, LocalState) and left.velocities:
            _run_out_(mean, left.anchors[bucket.index], left.velocities[bucket.index], left.outer.momentum)
        await training_thread()
        bucket.write_(mean)

    # -- choosing -----------------------------------------------------------------------------------

    async def _consider(self, state: AutoState, wire: Wire) -> None:
        """Measure, agree, and change the pick if another is better."""
        compute_s, optimizer_s, step_s = state.timer.read()
        hop_s, bit_per_s = await measure_wire(state.buckets, wire)
        own = torch.tensor([compute_s, optimizer_s, step_s, hop_s, 1 / bit_per_s], dtype=torch.float64)
        everyones = own.new_empty(wire.world_size * own.numel())
        await wire.all_gather(own, everyones)
        worst = everyones.view(wire.world_size, -1).amax(0).tolist()
        picked = torch.tensor([float(self._choose(state, wire, worst))], dtype=torch.float64)
        await wire.broadcast_(picked, source=0)
        self._switch(state, int(picked), tell=wire.rank == 0)

    def _choose(self, state: AutoState, wire: Wire, worst: Sequence[float]) -> int:
        compute_s, optimizer_s, step_s, hop_s, s_per_bit = worst
        bit_per_s = min(max(1 / s_per_bit, LOWEST_BIT_PER_S), HIGHEST_BIT_PER_S)
        if state.bit_per_s and not 1 / CHANGED < bit_per_s / state.bit_per_s < CHANGED:
            state.banned = [False] * len(OPTIONS)
            state.steps_s = [0.0] * len(OPTIONS)
        state.bit_per_s, state.steps_s[state.pick] = bit_per_s, step_s
        if not overrides(_options()[state.pick], "mix"):
            state.optimizer_s = optimizer_s
        earlier_s = state.steps_s[state.before]
        if state.pick != state.before and earlier_s and step_s > WRONG * earlier_s:
            state.banned[state.pick] = state.pick != 0  # exact SGD is always there to go back to
            return state.before
        if compute_s <= 0:
            return state.pick
        return self._fastest(state, wire.world_size, compute_s, hop_s)

    def _fastest(self, state: AutoState, world_size: int, compute_s: float, hop_s: float) -> int:
        """Among the options within the budget, by the planner, and by the clock of what is used already; that
        stays if none is clearly better."""
        planner = Planner(
            Workload(
                name="this training",
                shapes=tuple((bucket.num_parameters,) for bucket in reversed(state.buckets)),
                forward_s=compute_s * FORWARD_SHARE,
                backward_s=compute_s * (1 - FORWARD_SHARE),
                optimizer_s=state.optimizer_s,
            ),
            Cluster(hosts=(ClusterHost(name="worker", rate_bit_per_s=state.bit_per_s),), latency_s=hop_s),
        )
        times = {
            index: planner.play(option, world_size).step_s
            for index, option in enumerate(_options())
            if not state.banned[index] and self._allowed(OPTIONS[index], option, state, world_size)
        }
        if state.pick in times and state.steps_s[state.pick]:
            times[state.pick] = state.steps_s[state.pick]
        best = min(times, key=lambda index: times[index])
        # exact SGD wins among equals, and so does what is used already
        for index in (0, state.pick):
            if index in times and times[index] <= (1 + EQUAL) * times[best]:
                return index
        return best

    def _allowed(self, text: str, option: Strategy, state: AutoState, world_size: int) -> bool:
        settings, normalised = registry.resolved(option), state.buckets[0].normalised
        loss = expected(registry.parse(text)[0], settings, world_size, normalised=normalised)
        return loss is not None and loss.loss <= self.accuracy_budget

    def _switch(self, state: AutoState, pick: int, *, tell: bool) -> None:
        if pick == state.pick:
            return
        state.leaving, state.before, state.pick = state.pick, state.pick, pick
        state.flushing = isinstance(state.states[state.leaving], SparseState)
        state.switches += 1
        if tell:
            _log.warning(
                "AutoStrategy: %s instead of %s from here on: the wire carries %s, and %s took %s per step",
                OPTIONS[pick],
                OPTIONS[state.leaving],
                as_rate(float(f"{state.bit_per_s:.3g}")),
                OPTIONS[state.leaving],
                as_seconds(state.steps_s[state.leaving]),
            )

    async def settle(self, buckets: Sequence[Bucket], state: AutoState, wire: Wire) -> None:
        option = _options()[state.pick]
        if overrides(option, "settle"):
            await option.settle(buckets, state.states[state.pick], wire)
        state.timer.began_s = None

    def instruments(self, state: AutoState) -> Mapping[str, float]:
        return {"pick": state.pick, "switches": state.switches, "megabit_per_s": state.bit_per_s / 1e6}


_made: list[Strategy] = []


def _options() -> list[Strategy]:
    """The options, made once."""
    if not _made:
        _made.extend(registry.from_text(text) for text in OPTIONS)
    return _made


def _residuals(state: AutoState) -> list[torch.Tensor]:
    return next(each.residuals for each in state.states if isinstance(each, SparseState))


def _run_out_(mean: torch.Tensor, anchor: torch.Tensor, velocity: torch.Tensor, momentum: float) -> None:
    """Move the mean to where momentum would carry it if all that it has not seen yet came now and nothing
    after that: steps were made shorter in return. The velocity is zero then."""
    mean.sub_(anchor).div_(1 - momentum).add_(anchor)
    mean.add_(velocity, alpha=momentum**2 / (1 - momentum))
    velocity.zero_()
