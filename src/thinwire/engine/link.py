"""The link: a strategy joined to a user's model and optimizer, until it is detached."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine import claims, replicas, state
from thinwire.engine.beside import Beside
from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.buffers import BufferPolicy, Buffers
from thinwire.engine.deferred import Deferred
from thinwire.engine.driver import Task
from thinwire.engine.mixer import Mixer
from thinwire.engine.readers import Readers
from thinwire.engine.reducer import Reducer
from thinwire.engine.stats import Stats
from thinwire.engine.talk import Talk
from thinwire.errors import DataError, UsageError, check
from thinwire.strategies.base import Gradients, Strategy, norm_to_clip, overrides
from thinwire.traffic import Sizes
from thinwire.wire.base import Wire, Work
from thinwire.wire.ranges import range_of


class Link:
    """What `attach` returns. Leave it with `with`, or call `detach`; both are done by all workers."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        strategy: Strategy,
        wire: Wire,
        buckets: Sequence[ParameterBucket],
        *,
        bucket_bytes: int,
        buffers: BufferPolicy,
        timeout_s: float,
    ) -> None:
        self.strategy = strategy
        self.rank = wire.rank
        self.world_size = wire.world_size
        self._model = model
        self._optimizer = optimizer
        self._buckets = buckets
        self._talk = Talk(wire, timeout_s)
        # Where replicas differ so may their buffers, and Silent must stay silent.
        self._buffers = Buffers(model, buffers if strategy.replicas_agree else "local", self._talk.engine)
        self._attached = True
        self._parameters = {id(p): p for bucket in buckets for p in bucket.parameters}
        self._state = strategy.init(buckets, self._talk.wire)
        self._reducer: Reducer | Deferred = (
            Deferred(model, optimizer, buckets, bucket_bytes, self)
            if strategy.overlap == "forward"
            else Reducer(buckets, strategy.overlap, self)
        )
        self._talk.open()  # not earlier: what is above may refuse
        settle = self._settle if overrides(strategy, "settle") else None
        self._mixer = Mixer(buckets, self._mix, settle, self._talk.driver, self._talk.wire.now)
        self._serving: Task | None = None
        self._besides: list[Beside] = []
        if overrides(strategy, "serve"):
            self._serving = self._talk.start(strategy.serve(self._state, self._talk.wire), "serve")
        if overrides(strategy, "reduce"):
            self._reducer.hook()
        self._handles = [
            optimizer.register_step_pre_hook(lambda _, args, kwargs: self._before_step(args, kwargs)),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        self._readers = Readers(model, optimizer, settle=lambda: self.wait_for(self._mixer.landing_all()))
        if overrides(strategy, "mix"):
            self._readers.hook(self._handles)
        claims.claim(self._parameters.values())

    @property
    def timeout_s(self) -> float:
        return self._talk.timeout_s

    # -- what users ask ---------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        traffic = self._talk.traffic
        return Stats(
            steps=self._talk.steps,
            rounds=self._talk.rounds,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            messages=traffic.messages,
            exposed_s=self._talk.exposed_s,
            instruments=self.strategy.instruments(self._state),
        )

    @property
    def sizes(self) -> Sizes:
        """What travels, as the strategy's `rounds` wants to know it."""
        parcels = self._reducer.parcels()
        return Sizes(
            tuple((each.gradient.numel(), each.gradient.element_size()) for each in parcels),
            tuple((b.num_parameters, b.gradient.element_size()) for b in self._buckets),
            len(self._buckets[0].companions),
            exact=tuple(each.gradient.numel() - each.exact_from for each in parcels),
        )

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum a few numbers, such as a metric's parts, over all workers; called by all of them."""
        return self._talk.sum(values)

    def consensus_distance(self) -> float:
        """How far the workers' models are apart, relative to their size; called by all workers."""
        self._reducer.settle()  # but not the mixer: measuring must not land exchanges early
        return replicas.consensus_distance(self._buckets, self._talk.engine, self._talk.wait)

    def state_dict(self) -> dict[str, Any]:
        """What of the link must survive a stop, for this worker."""
        self.settle()
        return {"strategy": repr(self.strategy), "steps": self._talk.steps, "state": state.dump(self._state)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved["strategy"] != repr(self.strategy):
            raise DataError(
                f"the saved state is of {saved['strategy']}, this link has {self.strategy!r}",
                hint="attach with the strategy the state was saved with",
            )
        self.settle()
        self._talk.steps = saved["steps"]
        self._state = state.load(self._state, saved["state"])

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Load this worker's share of what another number of workers saved."""
        state = self.strategy.resize([each["state"] for each in saved], self.rank, self.world_size)
        self.load_state_dict({**saved[0], "state": state})

    def beside(self, name: str, settle: Callable[[], None]) -> Beside:
        """A lane and a thread for something else that talks beside training; made by all workers at the same
        point, and ended with the link. `settle` finishes what it has under way; its traffic is in `stats`."""
        lane = self._talk.engine.lane(f"{name} {len(self._besides)}")
        self._besides.append(Beside(lane, name, settle))
        return self._besides[-1]

    def gather_texts(self, text: str) -> list[str]:
        """Every worker's text, in order of rank; called by all workers."""
        if not self._attached:
            raise UsageError("the link was detached", hint="do it inside `with attach(...)`")
        return self._talk.gather_texts(text)

    # -- what users steer -------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in here only accumulate; the first one after it sends them."""
        before, self._reducer.arrivals.active = self._reducer.arrivals.active, False
        try:
            yield
        finally:
            self._reducer.arrivals.active = before

    def weight(self, num_samples: float) -> None:
        """How much the next backward of this worker counts: gradients become the mean over samples,
        not over workers.

        It holds for one backward; a worker that does not call it counts 1. So call it on every worker,
        or pass a share of the usual batch where a batch is smaller. In a half-precision model the
        weight is rounded to that precision, so there a share is better than a large number.
        """
        valid = math.isfinite(num_samples) and num_samples >= 0
        check(valid, "num_samples", "zero or a positive number", num_samples)
        self._reducer.weight = float(num_samples)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """For workers with unequal numbers of batches: whoever leaves the loop early keeps taking
        part with nothing to add until everyone has left, and ends with the last one's model."""
        self._buffers.joining = True
        yield
        self._buffers.present = False
        if overrides(self.strategy, "mix"):
            raise UsageError(f"{self.strategy!r} has no join: give all workers equal numbers of batches")
        if overrides(self.strategy, "reduce"):
            while self._reducer.shadow() > 0:
                pass
        self._buffers.joining, self._buffers.present = False, True
        if self.strategy.replicas_agree:
            self.settle()
            everything = self._model, self._optimizer, self._talk.steps
            self._talk.steps = replicas.adopt_last(*everything, self._talk.engine, self._talk.wait)

    def settle(self) -> None:
        """Finish what is under way: steps that overlap="forward" has put off, exchanges in the air.

        Called by all workers. Forward passes and state dicts finish the steps they need by
        themselves; call it before code that reads or changes parameters directly, such as a moving
        average or a clamp.
        """
        self._reducer.settle()
        self.wait_for(self._mixer.finishing())
        for each in self._besides:
            each.settle()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """torch's clip_grad_norm_ over this model, which works with every overlap and strategy.

        Where a strategy mixes parameters and leaves gradients to their worker, these are noisier than their
        mean, and are clipped to sqrt(P) times this norm. A strategy with a `clip_norm` of its own has clipped
        them already; then this only returns their norm.
        """
        with self._reducer.gradients():
            limit = norm_to_clip(self.strategy, max_norm, self.world_size)
            return nn.utils.clip_grad_norm_(self._model.parameters(), limit, norm_type)

    @torch.no_grad()
    def average_(self) -> None:
        """Overwrite all workers' parameters and floating-point buffers with their mean."""
        self.settle()
        tensors = replicas.averageable(self._model)
        replicas.average_tensors_(tensors, self._talk.engine, self._talk.wait)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean model in here, the worker's own again after it."""
        self.settle()
        tensors = replicas.averageable(self._model)
        own = [t.detach().clone() for t in tensors]
        self.average_()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, saved in zip(tensors, own, strict=True):
                    tensor.copy_(saved)

    # -- ending -----------------------------------------------------------------------------------

    def detach(self) -> None:
        """Finish what is under way and take every hook off; a second call does nothing."""
        if not self._attached:
            return
        try:
            self.settle()
            self._reducer.give_back()
            self._talk.leave_together()
        finally:
            self._unhook()
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.detach()
        elif self._attached:
            self._unhook()
            self._talk.say_why(error)
            self._stop()

    def _unhook(self) -> None:
        self._attached = False
        claims.release(self._parameters.values())
        self._reducer.unhook()
        self._readers.unhook()
        for handle in self._handles:
            handle.remove()

    def _stop(self) -> None:
        """First the threads: a coroutine cannot be closed while it runs there."""
        for each in self._besides:
            each.stop()
        self._talk.stop()
        self._mixer.abandon()
        if self._serving is not None:
            self._serving.coroutine.close()
        self._talk.close()

    # -- what backward asks (the reducer's Launcher) ------------------------------------------------

    def reduce(self, bucket: Gradients) -> Task:
        with range_of("reduce"):
            reducing = self.strategy.reduce(bucket, self._state, self._talk.wire)
            return self._talk.start(reducing, f"reduce {bucket.index}")

    def send_buffers(self) -> None:
        self._buffers.send(self._talk.start)

    def receiving_buffers(self) -> Iterator[Work]:
        return self._buffers.receiving()

    def wait_for(self, works: Iterable[Work]) -> None:
        self._talk.wait_for(works)

    def soon(self, call: Callable[[], None]) -> None:
        self._talk.soon(call)

    def agree(self, order: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return self._talk.agree(order)

    # -- what the optimizer's step asks -------------------------------------------------------------

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._reducer.check_step(args, kwargs)
        if self._serving is not None and self._serving.error is not None:
            raise self._serving.error
        # From the optimizer's lists: walking the model in every step is slow.
        for group in self._optimizer.param_groups:
            if any(p.requires_grad and id(p) not in self._parameters for p in group["params"]):
                raise UsageError(
                    "optimizer holds a parameter that requires a gradient and did not, or was not in the "
                    "model, at attach: nobody would send it",
                    hint="after unfreezing or adding parameters, detach and attach again",
                )
        with range_of("land"):
            self.wait_for(self._mixer.landing(self._talk.steps))

    def _after_step(self) -> None:
        self._reducer.record_step()
        self._talk.steps += 1
        self._talk.tell()
        if overrides(self.strategy, "mix"):
            with range_of("mix"):
                self.wait_for(self._mixer.launching(self._talk.steps))

    def _mix(self, bucket: ParameterBucket) -> Task:
        mixing = self.strategy.mix(bucket, self._state, self._talk.wire)
        return self._talk.start(mixing, f"mix {bucket.index}")

    def _settle(self) -> Task:
        settling = self.strategy.settle(self._buckets, self._state, self._talk.wire)
        return self._talk.start(settling, "settle")
