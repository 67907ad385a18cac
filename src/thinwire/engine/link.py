"""The link: a strategy joined to a user's model and optimizer, until it is detached."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.elastic.sampler import ElasticSampler
from thinwire.engine import state
from thinwire.engine.arguments import linked
from thinwire.engine.buckets import local
from thinwire.engine.common_calls import IN_LOOP, Call, CommonCalls, next_place
from thinwire.engine.companion import Companion
from thinwire.engine.core import Core, Stats
from thinwire.engine.driver import Driver, ProgressThread, Task
from thinwire.engine.endpoint import Make
from thinwire.engine.parameter_watch import ParameterWatch
from thinwire.engine.parts import Part
from thinwire.engine.regroup import Place, Regrouper, digest_of
from thinwire.engine.replicas import Replicas
from thinwire.engine.scaled_steps import ScaledSteps
from thinwire.engine.sharded_reducer import ShardedReducer
from thinwire.engine.split_state import SplitReplica, join_local, pieces_state
from thinwire.engine.state_access import StateAccessHooks
from thinwire.engine.step_hooks import IdleWatch, StepHooks
from thinwire.engine.steps import Step, each_epoch, each_step
from thinwire.engine.transport import Transport
from thinwire.errors import PeerError, PeerLost, UsageError, check
from thinwire.strategies.base import Strategy, overrides
from thinwire.wire.base import Lane
from thinwire.wire.work import Work

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Link:
    """The result of `attach`. Leave it with `with`, or call `detach`; both are done by all workers."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        rebuild: Callable[[Core], None],
        *,
        advises: bool = True,
        regrouper: Regrouper | None = None,
    ) -> None:
        """`rebuild` cuts the model into buckets anew; `advises`: say in the end if steps were too few;
        `regrouper`: what goes on when the workers change."""
        self.strategy: Strategy = core.strategy
        self.timeout_s: float = transport.timeout_s
        """How long a wait for others may take."""
        self._rebuild, self._regrouper = rebuild, regrouper
        self._calls = CommonCalls() if regrouper is None else regrouper.calls
        self._in_step = False
        """Whether this worker is inside a `Step`, which is done again as a whole."""
        self._past = Stats()
        """Of generations before this one."""
        self._enter(core, transport)
        self._model, self._optimizers = core.model, core.optimizers
        self._attached = True
        self._side_lanes: list[tuple[Callable[[], None], ProgressThread]] = []
        """What completes each, and the thread it has."""
        self._mixes, self._advises = overrides(self.strategy, "mix"), advises and self.world_size > 1
        self._step_hooks = StepHooks(
            self._optimizers,
            check=self._check_step,
            before=self._before_step,
            after=self._after_step,
        )
        self._access_hooks = StateAccessHooks(
            self._model,
            self._optimizers,
            finish=lambda: self._transport.wait_for(self._core.mixer.landing_all()),
        )
        self._idle_watch: IdleWatch | None = None
        self._scaled_steps: ScaledSteps | None = None
        if self._mixes:
            self._access_hooks.hook(self._step_hooks.handles)
            if self.world_size > 1:
                self._scaled_steps = ScaledSteps(self._optimizers)
                self._idle_watch = IdleWatch(self._optimizers, self.strategy)
        self._looks_for_wrapper = self.world_size > 1 and dist.is_initialized()
        self.companion: Companion | None = None
        """Something else that acts between steps, such as apoptosis."""
        self._hook()
        core.serve()
        # Before threads are ended; atexit would be too late to wait for others.
        threading._register_atexit(_detach_at_exit, weakref.ref(self))  # type: ignore[attr-defined]

    def _enter(self, core: Core, transport: Transport) -> None:
        self._core, self._transport = core, transport
        self.rank: int = core.lane.rank
        self.world_size: int = core.lane.world_size
        self._everyone = Replicas(core.outside, transport.wait)

    def _at_exit(self) -> None:
        """The script has ended without `detach`: do it now, or tell the others of the error it ended with."""
        error = getattr(sys, "last_value", None)
        if self._attached and error is not None:
            self.__exit__(type(error), error, None)
        elif self._attached:
            self.detach()

    def _hook(self) -> None:
        sent = [*(p for bucket in self._core.buckets for p in bucket.parameters)]
        sent += [rows.parameter for rows in self._core.rows]
        self._parameters = {id(p): p for p in sent}
        reducer = self._core.reducer
        owned = [piece.parameter for piece in reducer.pieces] if isinstance(reducer, ShardedReducer) else []
        held = {id(p) for p in (*sent, *owned)}  # what the optimizers may hold
        self._watch = ParameterWatch(self._model, self._core.buckets, held)
        if overrides(self.strategy, "reduce"):
            self._core.reducer.hooks.check = self._begin_pass
            self._core.reducer.hook()
        linked.update((p, True) for p in self._parameters.values())

    # -- what users ask ---------------------------------------------------------------------------

    @property
    def has_groups(self) -> bool:
        """Whether only some workers hold copies of some parameters."""
        return self._core.has_groups

    @property
    def sharded(self) -> bool:
        """Whether each worker updates, and keeps optimizer state of, a strip of the parameters only."""
        return self._core.sharded

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return self._core.steps

    @property
    def everyone(self) -> Replicas:
        """What workers do together between steps: sums, broadcasts, checks that they are alike."""
        return self._everyone

    @property
    def lost(self) -> BaseException | None:
        """Why this worker cannot train on, once another is gone; the next step raises it."""
        return self._core.lane.lost

    @property
    def stats(self) -> Stats:
        """Steps, traffic and waiting of this worker so far."""
        past, now = self._past, self._core.stats
        extra = {} if self.companion is None else self.companion.instruments()
        return replace(
            now,
            rounds=past.rounds + now.rounds,
            traffic=past.traffic + now.traffic,
            exposed_s=past.exposed_s + now.exposed_s,
            instruments={**now.instruments, **extra},
        )

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sum a few numbers, such as a metric's parts, over all workers; called by all of them."""

        what: Call = ["total", f"link.all_reduce of {len(values)} numbers", len(values)]

        def reduce() -> list[float]:
            with self._together(what[1]):
                return self._everyone.total(values)

        return self._persist(what, reduce)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every worker's value, in order of rank; called by all workers. JSON must be able to hold it:
        nothing that comes from the network is unpickled. In an elastic world, those of whoever is in this
        call: one that has just joined may be elsewhere."""
        if not self._attached:
            raise UsageError("the link was detached", hint="do it inside `with attach(...)`")

        what: Call = ["gather", "link.all_gather_object", 0]

        def gather() -> list[Any]:
            with self._together(what[1]):
                return [each[0] for each in self._everyone.gather_objects([value]) if each]

        return self._persist(what, gather)

    def consensus_distance(self) -> float:
        """How far the workers' models are apart, relative to their size, as far as all hold the same
        parameters; called by all workers."""
        return self._persist(["distance", "link.consensus_distance", 0], self._consensus_distance)

    def _consensus_distance(self) -> float:
        with self._together("link.consensus_distance"):
            # but without the mixer: measuring must not bring exchanges back early
            self._transport.wait_for(self._core.reducer.stepping())
            shared = [group.buckets for group in self._core.groups if group.ranks is None]
            return self._everyone.consensus_distance(list(chain(*shared)))

    def state_dict(self) -> dict[str, Any]:
        """The strategy's state on this worker, by parameter where it belongs to one."""
        self.synchronize()
        return self._core.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with what this worker has saved, also with other buckets."""
        self.resize([saved] * self.world_size)

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Go on with this worker's share of what another number of workers saved, in order of rank."""
        self.synchronize()
        self._core.load(saved)

    def reshape(
        self,
        kept: state.Kept,
        *,
        change: Callable[[], None] = lambda: None,
        move: Callable[[dict[str, Tensor]], None] = lambda values: None,
    ) -> None:
        """Go on with parameters that have shrunk: the strategy's state keeps the same indices.

        Called by all workers. `kept` has, by name of each changed parameter, the indices left by dimension
        (None: all). `change` makes parameters and the optimizer's state smaller, once nothing is under way;
        without it they have been already. `move`, if values of parameters change too, does the same to copies
        of parameters that the strategy keeps, given by name and before they shrink.
        """
        if self.sharded:
            raise UsageError("sharded=True has no reshape", hint="detach, cut the model, and attach again")
        self.synchronize()
        self._reassemble(change, self._core.shrunken_state(kept, move))

    def restore(self, saved: dict[str, Any], change: Callable[[], None]) -> None:
        """Go back to parameters of an earlier shape, which `change` brings back, with the strategy's state of
        that time; steps are counted on. Called by all workers."""
        self.synchronize()
        self._reassemble(change, {**saved, "steps": self._core.steps})

    def _reassemble(self, change: Callable[[], None], saved: dict[str, Any]) -> None:
        self._core.reducer.unhook()
        change()
        self._core.buffers.forget()
        self._rebuild(self._core)
        self._hook()
        self._core.load([saved] * self.world_size)

    def wait_for(self, works: Iterable[Work]) -> None:
        """Wait for works of a side lane, one after another."""
        self._transport.wait_for(works)

    def side_lane(self, name: str, finish: Callable[[], None]) -> tuple[Lane, Callable[[Make], Task]]:
        """A lane, and what starts coroutines on it in a thread of their own, for something else that is sent
        beside training; made by all workers at the same point, and ended with the link. `finish` completes
        what is under way, before a save and at `detach`; its traffic is in `stats`."""
        if self._regrouper is not None:
            raise UsageError(
                f"{name} needs a lane that lasts, and an elastic link has none",
                hint="attach without elastic=True",
            )
        number, progress = len(self._side_lanes), ProgressThread(f"thinwire-{name}")
        self._side_lanes.append((finish, progress))
        return self._core.side_lane(f"{name} {number}", Driver(progress.soon, progress.soon))

    # -- what users steer -------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here only accumulate; the first one after it sends them."""
        hooks = self._core.reducer.hooks
        before, hooks.active = hooks.active, False
        try:
            yield
        finally:
            self._core.reducer.hooks.active = before

    def weight(self, num_samples: float) -> None:
        """How much this worker's next backward counts: gradients become the mean over samples, not workers;
        so do models under `DiLoCo(merge="samples")`.

        It holds for one backward; a worker that does not call it counts 1. So call it on every worker,
        or pass a share of the usual batch where a batch is smaller. In a half-precision model the
        weight is rounded to that precision, so there a share is better than a large number.
        """
        valid = math.isfinite(num_samples) and num_samples >= 0
        check(valid, "num_samples", "zero or a positive number", num_samples)
        self._core.reducer.weight = float(num_samples)
        context = self._core.context
        context.samples = (context.samples or 0.0) + float(num_samples)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """For workers with unequal numbers of batches: whoever leaves the loop early keeps taking
        part with nothing to add until everyone has left, and ends with the last one's model."""
        if self._mixes:
            raise UsageError(
                f"{self.strategy!r} has no join: workers that have left would have no model to mix",
                hint="give all workers equal numbers of batches, such as DataLoader(..., drop_last=True)",
            )
        if self.sharded:
            raise UsageError(
                "sharded=True has no join: a worker that has left would not update its strip",
                hint="give all workers equal numbers of batches, such as DataLoader(..., drop_last=True)",
            )
        buffers = self._core.buffers
        buffers.joining = True
        yield
        buffers.present = False
        if overrides(self.strategy, "reduce"):
            while self._core.reducer.reduce_nothing() > 0:
                pass
        buffers.joining, buffers.present = False, True
        if self.strategy.replicas_agree:
            self.synchronize()
            self._core.steps = self._everyone.adopt_last(self._model, self._optimizers, self._core.steps)

    def synchronize(self) -> None:
        """Finish what is under way: steps that overlap="forward" has put off, exchanges in the background.

        Called by all workers. Forward passes and state dicts finish the steps they need by themselves; call
        it before code that reads or changes parameters directly, such as a moving average or a clamp.
        """
        if not self._meets and not self._mixes:  # then there is nothing to wait for together
            self._synchronize()
        else:
            self._persist(["synchronize", "link.synchronize", 0], self._synchronize)

    @property
    def _meets(self) -> bool:
        """Whether workers must come together to have nothing on the wire."""
        return overrides(self.strategy, "settle") or overrides(self.strategy, "serve")

    def _synchronize(self) -> None:
        with self._together("link.synchronize") if self._meets else contextlib.nullcontext():
            self._transport.wait_for(self._core.synchronizing())
            for finish, _ in self._side_lanes:
                finish()

    def observe(self, loss: float | Tensor) -> None:
        """Tell the loss of the step under way to whatever decides by it: `tw.Apoptosis(mode="adaptive")`."""
        if self.companion is not None:
            self.companion.observe(loss)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """torch's clip_grad_norm_ over this model, which works with every overlap and strategy.

        Where a strategy mixes parameters and leaves gradients to their worker, these are noisier than their
        mean, and are clipped to sqrt(P) times this norm. A strategy with a `clip_norm` of its own has clipped
        them already; then this only returns their norm.
        """
        return self._core.clip_grad_norm(max_norm, norm_type)

    @torch.no_grad()
    def average_(self) -> None:
        """Overwrite all workers' parameters and floating-point buffers with their mean."""
        self._persist(["average", "link.average_", 0], self._average)

    @torch.no_grad()
    def _average(self) -> None:
        with self._together("link.average_"):
            self.synchronize()
            for endpoint, tensors in self._core.averageable().items():
                Replicas(endpoint, self._transport.wait).average_tensors_(tensors)
        self._calls.mean_at = self._core.steps

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean model in here, the worker's own again after it."""
        self.synchronize()
        tensors = list(chain(*self._core.averageable().values()))
        own = [t.detach().clone() for t in tensors]
        self.average_()
        try:
            yield
        finally:
            self._calls.mean_at = -1
            with torch.no_grad():
                for tensor, saved in zip(tensors, own, strict=True):
                    tensor.copy_(saved)

    @contextlib.contextmanager
    def _together(self, call: str) -> Iterator[None]:
        """In here all workers are in this call of the user's; whoever is in another one is named."""
        transport = self._transport
        if transport.call:  # as a part of that one
            yield
            return
        transport.call, transport.calls = call, transport.calls + 1
        try:
            self._everyone.meet(call)
            yield
        finally:
            transport.call = ""

    # -- worlds that change -----------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """How often the workers have changed, counted from 1; 0 unless the link is elastic."""
        return 0 if self._regrouper is None else self._regrouper.synced

    @property
    def address(self) -> str:
        """host:port, for a worker that wants to join an elastic link."""
        me = self._elastic.world.me
        return f"{me.host}:{me.port}"

    def sampler(
        self, num_samples: int, *, batch_size: int, fixed: str = "worker", seed: int = 0, shuffle: bool = True
    ) -> ElasticSampler:
        """A `batch_sampler` for a DataLoader: this worker's share of the samples left, whoever is there.

        Args:
            num_samples: in the whole data set.
            batch_size: of this worker, or of all together.
            fixed: what stays when the number of workers P changes. "worker": each worker's batch, so that
                the batch of all, and what a learning rate means, change with P. "global": the batch of all.
            seed: of the order of samples; the same on all workers.
            shuffle: whether epochs are permuted at all.
        """
        made = ElasticSampler(
            num_samples=num_samples, batch_size=batch_size, fixed=fixed, seed=seed, shuffle=shuffle
        )
        self._elastic.add_sampler(made, self.rank, self.world_size)
        return made

    def carry(self, **parts: Part) -> None:
        """Also give these, such as `schedule=`, to whoever joins: anything with state_dict and
        load_state_dict. On a worker that has joined, they are loaded now."""
        for name, part in parts.items():
            check(name != "sampler", "parts", "named other than 'sampler'", name)
            self._elastic.add_part(name, part)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The numbers of the epochs that are left."""
        return each_epoch(self, self._sampler, num_epochs)

    def each_step(self, loader: Iterable[Any]) -> Iterator[Step]:
        """The steps of this epoch: `for step in link.each_step(loader):`, and in it `with step as batch:`."""
        return each_step(self, self._sampler, loader)

    def _regroup(self) -> None:
        """Go on with the workers that are left or have come, from the last step that was completed."""
        regrouper, core = self._elastic, self._core
        known = regrouper.world.known_steps
        core.reducer.unhook()
        self._past = self.stats
        regrouper.end(core, self._transport, PeerLost("this worker goes on with others"))
        place = Place.of(core)
        known[core.lane.rank] = core.steps
        for parameter in self._model.parameters():
            parameter.grad = None
        self._enter(*regrouper.form(place, known))
        self._hook()
        self._core.serve()

    def _meet(self, what: str) -> bool:
        """Wait for all workers; False if they have changed meanwhile, so that there may be more to do."""
        try:
            self._line_up(IN_LOOP)
            self._everyone.meet(what)
        except PeerLost:
            self._regroup()
            return False
        return True

    def _begin_step(self) -> bool:
        """Be in the loop with all others; False if the workers have changed meanwhile."""
        if self._calls.mixed:
            try:
                self._line_up(IN_LOOP)
            except PeerLost:
                self._regroup()
                return False
        return True

    def _line_up(self, mine: Call) -> None:
        """While somebody may be at another place of the program, help those in other calls first."""
        calls = self._calls
        while calls.mixed:
            place = next_place(self._everyone.gather_objects(mine))
            calls.mixed = place != IN_LOOP
            if place == mine:
                return
            calls.note(place, self._help(place))

    def _help(self, call: Call) -> Any:
        """Take part in a call of others, with nothing to add."""
        kind, name, size = call
        match kind:
            case "synchronize":
                return self._synchronize()
            case "average":
                return self._average()
            case "finish":
                return self._finish()
            case "distance":
                return self._consensus_distance()
        with self._together(str(name)):
            if kind == "total":
                return self._everyone.total([0.0] * int(size))
            if kind == "gather":
                return [each[0] for each in self._everyone.gather_objects([]) if each]
        return None

    def _note_epoch(self) -> None:
        """All workers have come to the end of an epoch with the same number of steps."""
        self._elastic.since = self._core.steps

    @property
    def _elastic(self) -> Regrouper:
        if self._regrouper is None:
            raise UsageError("the workers of this link do not change", hint="attach with elastic=True")
        return self._regrouper

    @property
    def _sampler(self) -> ElasticSampler:
        if (found := self._elastic.sampler) is None:
            raise UsageError("there is no sampler", hint="make one with link.sampler(...) before the loop")
        return found

    def _persist(self, what: Call, call: Callable[[], T]) -> T:
        """Make a call that all workers make together, again after each change of the workers unless it has
        ended on one of them. As a part of a step or another call it is not made again by itself."""
        if self._regrouper is None or self._in_step or self._transport.call:
            return call()
        calls = self._calls
        number = calls.done + 1
        while True:
            try:
                self._line_up(what)
                number = calls.done + 1
                result = call()
            except PeerLost:
                self._regroup()
                if calls.done >= number and calls.what == what:
                    found: T = calls.result
                    return found
            else:
                calls.note(what, result)
                return result

    # -- ending -----------------------------------------------------------------------------------

    def detach(self) -> None:
        """Finish what is under way and take every hook off; a second call does nothing.

        Where a strategy mixes parameters, workers have models that differ: all of them leave with the mean.
        """
        if not self._attached:
            return
        failure = sys.exception()  # in a `finally`, what it is about must not be hidden behind our waiting
        self._transport.leave(failure)
        try:
            self._persist(["finish", "link.detach", 0], self._finish)
            if self._regrouper is not None:
                # whoever is lost now must not leave some with another mean than others
                self._persist(["meet", "the end", 0], lambda: self._everyone.meet("the end"))
                self._note_end(self._regrouper)
                self._regrouper.world.finish()
            self._transport.wait_for(self._core.leaving())
            self._join_strips()
            self._everyone.meet("link.detach")  # nobody closes its connections while others still talk
        except PeerError:
            if failure is None and self._regrouper is None:  # of an elastic world, others may leave first
                raise
        except BaseException as error:
            self._transport.tell_error(failure or error)
            raise
        finally:
            self._unhook()
            self._stop()

    def _finish(self) -> None:
        """What all workers do together when training is over."""
        with self._together("link.detach"):
            self.synchronize()
            if self._mixes and self._calls.mean_at != self._core.steps:
                self.average_()
            told, advice = (self.strategy.advice(n, self.world_size) for n in (None, self._core.steps))
            if self._advises and self.rank == 0 and advice != told:
                _log.warning(advice)

    def _note_end(self, regrouper: Regrouper) -> None:
        journal = regrouper.world.journal
        if journal.is_open:
            journal.note("ended", generation=self.generation, steps=self.steps, model=digest_of(self._model))

    def _join_strips(self) -> None:
        """After strip-owned updates: the optimizers' state, whole again on every worker."""
        reducer = self._core.reducer
        if not isinstance(reducer, ShardedReducer):
            return
        for group in self._core.groups:
            replicas = Replicas(group.endpoint, self._transport.wait)
            pairs = [zip(bucket.names, bucket.parameters, strict=True) for bucket in group.buckets]
            named = dict(chain(*pairs))
            mine = pieces_state(reducer.owned, self._optimizers, named)
            entries: dict[str, list[dict[str, Any]]] = {}
            for rank in range(group.endpoint.lane.world_size):
                for name, entry in replicas.broadcast_state(mine, rank):
                    entries.setdefault(name, []).append(entry)
            for name, found in entries.items():
                reducer.owned.joined[id(named[name])] = join_local(named[name], found)

    def split_replica(self, optimizer: Optimizer) -> SplitReplica | None:
        """Model and optimizer as a part of checkpoints, where no worker need hold all of them."""
        reducer = self._core.reducer
        owned = reducer.owned if isinstance(reducer, ShardedReducer) else None
        first = {name: self.rank == 0 for name, _ in self._model.named_parameters()}
        for group in self._core.groups:
            for bucket in group.buckets:
                if group.ranks is not None and any(local(p) is p for p in bucket.parameters):
                    return None  # by replica_ranks: nobody knows which part of what it is
                first |= dict.fromkeys(bucket.names, group.endpoint.lane.rank == 0)
        if not self.strategy.replicas_agree or (owned is None and not self.has_groups):
            return None
        return SplitReplica(self._model, optimizer, first, self.rank, owned)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.detach()
        elif self._attached:
            self._unhook()
            self._transport.tell_error(error)
            self._stop()

    def _unhook(self) -> None:
        self._attached = False
        if self.companion is not None:
            self.companion.leave()
        for parameter in self._parameters.values():
            linked.pop(parameter, None)
        self._core.reducer.unhook()
        self._access_hooks.unhook()
        self._step_hooks.unhook()
        if self._idle_watch is not None:
            self._idle_watch.stop()
        if self._scaled_steps is not None:
            self._scaled_steps.unhook()

    def _stop(self) -> None:
        for _, progress in self._side_lanes:
            progress.stop()
        self._transport.stop()
        self._core.abandon()
        if self._regrouper is not None:
            self._regrouper.world.close()
        else:
            self._core.lane.close()

    # -- what the optimizer's step asks -------------------------------------------------------------

    def _check_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._transport.passes += 1
        self._watch.check_place()
        if self._mixes:  # otherwise it was asked when backward began
            self._check_pass()
        if self._idle_watch is not None:
            self._idle_watch.stop()
            self._idle_watch = None
        self._core.reducer.check_step(args, kwargs)
        self._watch.check_held(self._optimizers)

    def _begin_pass(self) -> None:
        self._transport.passes += 1
        self._check_pass()

    def _check_pass(self) -> None:
        """Asked before gradients are sent: each worker then finds what is wrong with the model by itself, and
        a wrapper has nothing under way."""
        self._watch.check_kind()
        if self._looks_for_wrapper:
            self._looks_for_wrapper = False
            self._check_wrapper()

    def _check_wrapper(self) -> None:
        """A wrapper made after attach leaves no trace in the model: look at all objects, once."""
        wrappers = [each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__]
        if any(id(p) in self._parameters for each in wrappers for p in each.module.parameters()):
            raise UsageError(
                "the model is also wrapped in DistributedDataParallel, which sends every gradient itself",
                hint="train the plain model, which thinwire takes care of, and delete the wrapper; or use "
                "tw.ddp_hook(strategy) with the wrapper and no attach",
            )

    def _before_step(self) -> None:
        if (lost := self.lost) is not None:  # a strategy that waits for nobody would train on alone
            raise lost
        self._transport.wait_for(self._core.before_step())

    def _after_step(self) -> None:
        try:
            self._transport.wait_for(self._core.after_step())
        except PeerLost:
            if self._regrouper is None:
                raise
            self._core.steps += 1  # the step is made; mixing is given up, and `Step` regroups
        self._transport.passes = 0
        self._transport.set_status()
        if self.companion is not None:
            self.companion.stepped()


def _detach_at_exit(link: weakref.ref[Link]) -> None:
    if (mine := link()) is not None:
        mine._at_exit()
