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
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from thinwire.engine.arrivals import Arrivals
from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.needs import Needs
from thinwire.engine.pieces import Pieces
from thinwire.engine.readers import Readers
from thinwire.engine.reducer import Launcher
from thinwire.engine.stepper import Stepper
from thinwire.errors import UsageError
from thinwire.strategies.base import Gradients
from thinwire.wire.base import Work


@dataclass(slots=True)
class _Load:
    """One bucket on its way from backward to its update."""

    bucket: ParameterBucket
    reduced: bool = False
    """Sent, or being sent, and not yet applied."""
    to_step: bool = False
    """`optimizer.step()` was called since."""
    versions: list[int] = field(default_factory=list)
    """Of its parameters when that was: whoever writes to one now would be overtaken by the step."""
    missed: bool = False
    """Its last update was not asked for by the forward of this pass."""


class Deferred:
    """Gradients are final, and applied, when the next forward needs their parameters."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        buckets: Sequence[ParameterBucket],
        piece_bytes: int,
        launcher: Launcher,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.weight = 1.0
        self._stepper = Stepper(optimizer)
        self.arrivals = Arrivals(buckets, self, announce=True)
        self._launcher = launcher
        self._needs = Needs(model, buckets, self._need)
        self._readers = Readers(model, optimizer, settle=self.settle, drop=self._drop)
        self._pieces = Pieces(buckets, piece_bytes, launcher, clock)
        self._loads = [_Load(bucket) for bucket in buckets]
        self._pending = False
        self._in_backward = False

    def parcels(self) -> Sequence[Gradients]:
        """What goes over the wire in one pass."""
        return self._pieces.all()

    def foresee(self, order: Sequence[int]) -> None:
        """In which order buckets will be needed, for whoever lets no forward be watched."""
        self._needs.order[:] = order

    def hook(self) -> None:
        self._stepper.mark()
        self.arrivals.hook()
        self._needs.hook()
        self._readers.hook(self._needs.handles)

    def unhook(self) -> None:
        self.arrivals.unhook()
        self._needs.unhook()
        self._readers.unhook()
        self._stepper.unmark()

    # -- backward: send ----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        for load in self._loads:
            load.missed = load.to_step
        self.settle()
        if any(load.reduced for load in self._loads):
            raise UsageError(
                "a second backward before optimizer.step()",
                hint="accumulate inside link.no_sync(), drop gradients with optimizer.zero_grad(), "
                "or use AllReduce(overlap='backward')",
            )
        self._in_backward = True
        self._begin()

    def _begin(self) -> None:
        self._pieces.begin(self._needs.order)
        self._launcher.send_buffers()

    def bucket_is_full(self, index: int) -> None:
        load = self._loads[index]
        load.bucket.gather_(self.weight)
        if load.missed:
            _check_unused(load.bucket)
        for parameter in load.bucket.parameters:
            parameter.grad = None  # the engine owns it now; whoever still looks for it finds nothing
        self._send(load)

    def backward_ends(self) -> None:
        for load in self._loads:
            if not self._pieces.full(load.bucket.index):
                self.bucket_is_full(load.bucket.index)
        self._pieces.end()
        self.weight = 1.0
        self._in_backward = False

    def _send(self, load: _Load) -> None:
        load.reduced = True
        self._pieces.fill(load.bucket.index)

    # -- step and forward: apply -------------------------------------------------------------------

    def check_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepper.check_call(args, kwargs)
        self._check_sent()

    def _check_sent(self) -> None:
        """Whoever steps or clips expects all gradients to count; those of a parameter's own would not."""
        unsent = [
            name
            for load in self._loads
            for name, p in zip(load.bucket.names, load.bucket.parameters, strict=True)
            if p.grad is not None
        ]
        if unsent:
            raise UsageError(
                f"{len(unsent)} parameters, such as {unsent[0]}, have gradients that were never sent",
                hint="let the last backward before a step be outside link.no_sync(), and leave p.grad alone",
            )

    def record_step(self) -> None:
        """What `optimizer.step()` does: nothing yet."""
        if self._pending:
            self.settle()
        self._stepper.record()
        for load in self._loads:
            load.to_step = load.reduced
            if load.to_step:
                load.versions = [p._version for p in load.bucket.parameters]
        self._pending = any(load.to_step for load in self._loads)

    def _need(self, indices: Iterable[int]) -> None:
        self._launcher.wait_for(self.needing(indices))

    def needing(self, indices: Iterable[int]) -> Iterator[Work]:
        """What to wait for, one after another, until these buckets are up to date."""
        if not self._in_backward:
            yield from self._launcher.receiving_buffers()
        if self._pending:
            for index in indices:
                yield from self._applying(self._loads[index])

    def settle(self) -> None:
        """Finish every step that was asked for."""
        self._need(range(len(self._loads)))
        self._pending = False

    def _applying(self, load: _Load) -> Iterator[Work]:
        if not load.to_step:
            return
        yield from self._pieces.works(load.bucket.index)
        _check_unused(load.bucket)
        parameters = load.bucket.parameters
        for name, parameter, version in zip(load.bucket.names, parameters, load.versions, strict=True):
            if parameter._version != version:
                raise UsageError(
                    f"{name} was written to after optimizer.step(), before its update",
                    hint="call link.settle() between optimizer.step() and code that changes parameters",
                )
        # An evaluation may ask for it in inference mode, in which optimizer state must not be made.
        with torch.inference_mode(False), torch.no_grad(), _lent(load.bucket):
            load.to_step = load.reduced = False
            self._stepper.step(load.bucket)

    def reducing(self) -> Iterator[Work]:
        """What to wait for before `gradients` that no step has asked for yet can be seen."""
        for load in self._loads:
            if load.reduced and not load.to_step:
                yield from self._pieces.works(load.bucket.index)

    def _waiting(self) -> list[_Load]:
        """What is reduced and waits for an optimizer.step()."""
        self._launcher.wait_for(self.reducing())
        return [load for load in self._loads if load.reduced and not load.to_step]

    def _drop(self) -> None:
        """What zero_grad does: forget gradients that nobody asked to step."""
        for load in self._waiting():
            load.reduced = False

    @contextlib.contextmanager
    def gradients(self) -> Iterator[None]:
        """The reduced gradients as the parameters' own in here, to be changed in place."""
        self._check_sent()
        with contextlib.ExitStack() as stack:
            for load in self._waiting():
                stack.enter_context(_lent(load.bucket))
            yield

    def give_back(self) -> None:
        """Before detaching: reduced gradients that wait for a step become the parameters' own again."""
        for load in self._waiting():
            with _lent(load.bucket):
                reduced = [None if p.grad is None else p.grad.clone() for p in load.bucket.parameters]
            for parameter, gradient in zip(load.bucket.parameters, reduced, strict=True):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            load.reduced = False

    def shadow(self) -> float:
        """Take part in the others' reduction with nothing to add; how much they counted, on average."""
        self.settle()
        self._drop()
        self._begin()
        for load in self._loads:
            load.bucket.shadow_()
            self._send(load)
        self._pieces.end()
        self._drop()
        self._launcher.wait_for(self._launcher.receiving_buffers())
        return self._loads[0].bucket.mean_weight()


def _check_unused(bucket: ParameterBucket) -> None:
    """A gradient of before the update can only come from a use that did not ask for the update."""
    if any(p.grad is not None for p in bucket.parameters):
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
