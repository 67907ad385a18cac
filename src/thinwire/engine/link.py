"""The link: a strategy joined to a user's model and optimizer, until it is detached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.elastic.sampler import ElasticSampler
from thinwire.engine.companion import Companion
from thinwire.engine.core import Core, Stats
from thinwire.engine.driver import Task
from thinwire.engine.endpoint import Make
from thinwire.engine.leaves import Kept
from thinwire.engine.parts import Part
from thinwire.engine.regroup import Regrouper
from thinwire.engine.replicas import Replicas
from thinwire.engine.runtime import LinkRuntime
from thinwire.engine.split_state import SplitReplica
from thinwire.engine.steps import ElasticLoop, Step
from thinwire.errors import UsageError, check
from thinwire.strategies.base import Strategy, overrides
from thinwire.wire.base import Lane
from thinwire.wire.work import Work


class Link:
    """The result of `attach`. Leave it with `with`, or call `detach`; both are done by all workers."""

    def __init__(self, runtime: LinkRuntime) -> None:
        self.strategy: Strategy = runtime.strategy
        self.timeout_s: float = runtime.timeout_s
        """How long a wait for others may take."""
        self._runtime, self._caller = runtime, runtime.caller
        self._model, self._optimizers = runtime.model, runtime.optimizers
        runtime.on_generation = self._enter
        self._enter(runtime.core)

    def _enter(self, core: Core) -> None:
        self._core = core
        self.rank: int = core.lane.rank
        self.world_size: int = core.lane.world_size

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
        return self._caller.everyone

    @property
    def companion(self) -> Companion | None:
        """Something else that acts between steps, such as apoptosis."""
        return self._runtime.companion

    @property
    def lost(self) -> BaseException | None:
        """Why this worker cannot train on, once another is gone; the next step raises it."""
        return self._core.lane.lost

    @property
    def stats(self) -> Stats:
        """Steps, traffic and waiting of this worker so far."""
        return self._runtime.stats

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Sum a few numbers, such as a metric's parts, over all workers; called by all of them."""
        return self._caller.total(values)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every worker's value, in order of rank; called by all workers. JSON must be able to hold it:
        nothing that comes from the network is unpickled. In an elastic world, those of whoever is in this
        call: one that has just joined may be elsewhere."""
        if not self._runtime.attached:
            raise UsageError("the link was detached", hint="do it inside `with attach(...)`")
        return self._caller.gather(value)

    def consensus_distance(self) -> float:
        """How far the workers' models are apart, relative to their size, as far as all hold the same
        parameters; called by all workers."""
        return self._caller.distance()

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
        kept: Kept,
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
        self._runtime.reshape(kept, change, move)

    def restore(self, saved: dict[str, Any], change: Callable[[], None]) -> None:
        """Go back to parameters of an earlier shape, which `change` brings back, with the strategy's state of
        that time; steps are counted on. Called by all workers."""
        self._runtime.restore(saved, change)

    def wait_for(self, works: Iterable[Work]) -> None:
        """Wait for works of a side lane, one after another."""
        self._runtime.transport.wait_for(works)

    def side_lane(self, name: str, finish: Callable[[], None]) -> tuple[Lane, Callable[[Make], Task]]:
        """A lane, and what starts coroutines on it in a thread of their own, for something else that is sent
        beside training; made by all workers at the same point, and ended with the link. `finish` completes
        what is under way, before a save and at `detach`; its traffic is in `stats`."""
        if self._runtime.regrouper is not None:
            raise UsageError(
                f"{name} needs a lane that lasts, and an elastic link has none",
                hint="attach without elastic=True",
            )
        return self._runtime.side_lanes.open(self._core, name, finish)

    # -- what users steer -------------------------------------------------------------------------

    @contextmanager
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

    @contextmanager
    def join(self) -> Iterator[None]:
        """For workers with unequal numbers of batches: whoever leaves the loop early keeps taking
        part with nothing to add until everyone has left, and ends with the last one's model."""
        if overrides(self.strategy, "mix"):
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
            self._core.steps = self.everyone.adopt_last(self._model, self._optimizers, self._core.steps)

    def synchronize(self) -> None:
        """Finish what is under way: steps that overlap="forward" has put off, exchanges in the background.

        Called by all workers. Forward passes and state dicts finish the steps they need by themselves; call
        it before code that reads or changes parameters directly, such as a moving average or a clamp.
        """
        self._caller.synchronize()

    def observe(self, loss: float | Tensor) -> None:
        """Tell the loss of the step under way to whatever decides by it: `tw.Apoptosis(mode="adaptive")`."""
        if (companion := self.companion) is not None:
            companion.observe(loss)

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
        self._caller.average()

    def averaged(self) -> AbstractContextManager[None]:
        """The mean model in here, the worker's own again after it."""
        return self._caller.averaged()

    # -- worlds that change -----------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """How often the workers have changed, counted from 1; 0 unless the link is elastic."""
        regrouper = self._runtime.regrouper
        return 0 if regrouper is None else regrouper.synced

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
        return self._loop().epochs(num_epochs)

    def each_step(self, loader: Iterable[Any]) -> Iterator[Step]:
        """The steps of this epoch: `for step in link.each_step(loader):`, and in it `with step as batch:`."""
        return self._loop().steps(loader)

    def _loop(self) -> ElasticLoop:
        return ElasticLoop(self, self._elastic, self._caller, self._runtime.regroup)

    @property
    def _elastic(self) -> Regrouper:
        if (regrouper := self._runtime.regrouper) is None:
            raise UsageError("the workers of this link do not change", hint="attach with elastic=True")
        return regrouper

    # -- ending -----------------------------------------------------------------------------------

    def detach(self) -> None:
        """Finish what is under way and take every hook off; a second call does nothing.

        Where a strategy mixes parameters, workers have models that differ: all of them leave with the mean.
        """
        self._runtime.detach()

    def split_replica(self, optimizer: Optimizer) -> SplitReplica | None:
        """Model and optimizer as a part of checkpoints, where no worker need hold all of them."""
        return SplitReplica.of(self._core, optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._runtime.detach()
        else:
            self._runtime.fail(error)
