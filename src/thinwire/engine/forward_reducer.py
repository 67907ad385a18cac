"""Gradients sent and applied as late as the next forward allows: exact SGD with more to hide behind.

Das et al. (2016, arXiv:1602.06709): a layer's communication need only be finished when the next
forward reaches that layer. So `optimizer.step()` here only records its settings, and each bucket is
stepped with them when its parameters are needed: by a forward, a state dict, or the end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.engine.backward_hooks import BackwardHooks
from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.forward_hooks import ForwardHooks
from thinwire.engine.optimizer import PartialOptimizer
from thinwire.engine.pending_gradient import PendingGradient
from thinwire.engine.pieces import Pieces
from thinwire.engine.reducer import Launcher
from thinwire.engine.state_access import StateAccessHooks
from thinwire.errors import UsageError
from thinwire.wire.work import Work


@dataclass(slots=True)
class _Update:
    """One bucket on its way from backward to its update."""

    bucket: ParameterBucket
    reduced: bool = False
    """Sent, or being sent, and not yet applied."""
    to_step: bool = False
    """`optimizer.step()` was called since."""
    versions: list[int] = field(default_factory=list)
    """Versions of its parameters at that call: the step would overwrite what is written to them since."""
    missed: bool = False
    """Its last update was not asked for by the forward of this pass."""
    pending: Sequence[PendingGradient | None] = ()
    """What its parameters have as gradients from backward to step."""


class ForwardReducer:
    """Gradients are final, and applied, when the next forward needs their parameters."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        buckets: Sequence[ParameterBucket],
        piece_bytes: int,
        launcher: Launcher,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.weight = 1.0
        self._optimizer = PartialOptimizer(optimizers)
        self.hooks = BackwardHooks(buckets, self, announce=True)
        self._launcher = launcher
        self._forward_hooks = ForwardHooks(model, buckets, self._need)
        self._access_hooks = StateAccessHooks(model, optimizers, finish=self.finish_steps, drop=self._drop)
        self._pieces = Pieces(buckets, piece_bytes, launcher, clock)
        self._updates = [_Update(bucket, pending=[None] * len(bucket.parameters)) for bucket in buckets]
        self._pending = False
        self._in_backward = False

    def foresee(self, order: Sequence[int]) -> None:
        """Set the order in which buckets will be needed, where no forward can be watched."""
        self._forward_hooks.order[:] = order

    def hook(self) -> None:
        for update in self._updates:
            update.pending = [
                None if view is None else PendingGradient.of(view, partial(self._look, update))
                for view in update.bucket.plain_views()
            ]
        self.hooks.hook()
        self._forward_hooks.hook()
        self._access_hooks.hook(self._forward_hooks.handles)

    def unhook(self) -> None:
        self.hooks.unhook()
        self._forward_hooks.unhook()
        self._access_hooks.unhook()

    # -- backward: send ----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        for update in self._updates:
            update.missed = update.to_step
        self.finish_steps()
        if any(update.reduced for update in self._updates):
            raise UsageError(
                "a second backward before optimizer.step()",
                hint="accumulate inside link.no_sync(), drop gradients with optimizer.zero_grad(), "
                "or use AllReduce(overlap='backward')",
            )
        self._in_backward = True
        self._begin()

    def _begin(self) -> None:
        self._pieces.begin(self._forward_hooks.order)
        self._launcher.send_buffers()

    def bucket_is_full(self, index: int) -> None:
        update = self._updates[index]
        update.bucket.gather_(self.weight)
        if update.missed:
            _check_unused(update.bucket)
        self._send(update)
        self._replace_gradients(update)

    def backward_ends(self) -> None:
        for update in self._updates:
            if not self._pieces.full(update.bucket.place):
                self.bucket_is_full(update.bucket.place)
        self._pieces.end()
        self.weight = 1.0
        self._in_backward = False

    def _replace_gradients(self, update: _Update) -> None:
        """The engine owns the gradients now; whoever looks at them waits for the reduced ones."""
        for parameter, pending in zip(update.bucket.parameters, update.pending, strict=True):
            parameter.grad = pending if parameter.requires_grad else None

    def _look(self, update: _Update) -> None:
        if update.reduced and not update.to_step:
            self._launcher.wait_for(self._pieces.works(update.bucket.place))
            update.bucket.flat.divide_()

    def _send(self, update: _Update) -> None:
        update.reduced = True
        self._pieces.fill(update.bucket.place)

    # -- step and forward: apply -------------------------------------------------------------------

    def check_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._optimizer.check_call(args, kwargs)
        self._check_sent()
        for update in self._updates:
            for parameter in update.bucket.parameters:
                parameter.grad = None  # so the optimizer's own step changes nothing

    def _check_sent(self) -> None:
        """Whoever steps or clips expects all gradients to count; those of a parameter's own would not."""
        unsent = [
            name
            for update in self._updates
            for name, p in zip(update.bucket.names, update.bucket.parameters, strict=True)
            if p.grad is not None and (not isinstance(p.grad, PendingGradient) or p.grad.was_accumulated_into)
        ]
        if unsent:
            raise UsageError(
                f"{len(unsent)} parameters, such as {unsent[0]}, have gradients that were never sent",
                hint="let the last backward before a step be outside link.no_sync(), and leave p.grad alone",
            )

    def record_step(self) -> None:
        """What `optimizer.step()` does: nothing yet."""
        if self._pending:
            self.finish_steps()
        self._optimizer.record()
        for update in self._updates:
            update.to_step = update.reduced
            if update.to_step:
                update.versions = [p._version for p in update.bucket.parameters]
        self._pending = any(update.to_step for update in self._updates)

    def _need(self, indices: Iterable[int]) -> None:
        self._launcher.wait_for(self.needing(indices))

    def needing(self, indices: Iterable[int]) -> Iterator[Work]:
        """What to wait for, one after another, until these buckets are up to date."""
        if not self._in_backward:
            yield from self._launcher.receiving_buffers()
        if self._pending:
            for index in indices:
                yield from self._applying(self._updates[index])

    def stepping(self) -> Iterator[Work]:
        """What to wait for until every step that was asked for is made."""
        yield from self.needing(range(len(self._updates)))
        self._pending = False

    def finish_steps(self) -> None:
        """Make every step that was asked for."""
        self._launcher.wait_for(self.stepping())

    def _applying(self, update: _Update) -> Iterator[Work]:
        if not update.to_step:
            return
        yield from self._pieces.works(update.bucket.place)
        update.bucket.flat.divide_()
        if update.bucket.flat.refused and not self._optimizer.skips:
            yield from self._launcher.refusal.raising(asked_before=1)
        _check_unused(update.bucket)
        parameters = update.bucket.parameters
        for name, parameter, version in zip(update.bucket.names, parameters, update.versions, strict=True):
            if parameter._version != version:
                raise UsageError(
                    f"{name} was written to after optimizer.step(), before its update",
                    hint="call link.synchronize() between optimizer.step() and code that changes parameters",
                )
        # An evaluation may ask for it in inference mode, in which optimizer state must not be made.
        with torch.inference_mode(False), torch.no_grad(), _lent(update.bucket):
            update.to_step = update.reduced = False
            self._optimizer.step(update.bucket)

    def reducing(self) -> Iterator[Work]:
        """What to wait for before `gradients` that no step has asked for yet can be seen."""
        for update in self._updates:
            if update.reduced and not update.to_step:
                yield from self._pieces.works(update.bucket.place)

    def _waiting(self) -> list[_Update]:
        """What is reduced and waits for an optimizer.step()."""
        self._launcher.wait_for(self.reducing())
        return [update for update in self._updates if update.reduced and not update.to_step]

    def _drop(self) -> None:
        """What zero_grad does: forget gradients that nobody asked to step."""
        for update in self._waiting():
            update.reduced = False

    @contextlib.contextmanager
    def gradients(self) -> Iterator[None]:
        """The reduced gradients as the parameters' own in here, to be changed in place."""
        self._check_sent()
        with contextlib.ExitStack() as stack:
            for update in self._waiting():
                stack.enter_context(_lent(update.bucket))
            yield

    def give_back(self) -> None:
        """Before detaching: reduced gradients that wait for a step become the parameters' own again."""
        for update in self._waiting():
            for parameter in update.bucket.parameters:
                if isinstance(parameter.grad, PendingGradient):
                    parameter.grad = None
            with _lent(update.bucket):
                reduced = [None if p.grad is None else p.grad.clone() for p in update.bucket.parameters]
            for parameter, gradient in zip(update.bucket.parameters, reduced, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            update.reduced = False

    def reduce_nothing(self) -> float:
        """Take part in the others' reduction with nothing to add; gives how much they counted, on average."""
        self.finish_steps()
        self._drop()
        self._begin()
        for update in self._updates:
            update.bucket.flat.fill_nothing_()
            self._send(update)
        self._pieces.end()
        self._drop()
        self._launcher.wait_for(self._launcher.receiving_buffers())
        return self._updates[0].bucket.flat.mean_weight()


def _check_unused(bucket: ParameterBucket) -> None:
    """A gradient of before the update can only come from a use that did not ask for the update."""
    if any(p.grad is not None and not isinstance(p.grad, PendingGradient) for p in bucket.parameters):
        raise UsageError(
            f"one of {', '.join(bucket.names)} was used before its update, without its module",
            hint="call modules rather than using their weights, or use AllReduce(overlap='backward')",
        )


@contextlib.contextmanager
def _lent(bucket: ParameterBucket) -> Iterator[None]:
    """The bucket's reduced gradients as the parameters' own in here, without a copy."""
    own = [p.grad for p in bucket.parameters]
    bucket.lend_()
    try:
        yield
    finally:
        for parameter, gradient in zip(bucket.parameters, own, strict=True):
            parameter.grad = gradient
