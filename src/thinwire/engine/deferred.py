"""Gradients sent and applied as late as the next forward allows: exact SGD with more to hide behind.

Das et al. (2016, arXiv:1602.06709): a layer's communication need only be finished when the next
forward reaches that layer. So `optimizer.step()` here only records its settings, and each bucket is
stepped with them when its parameters are needed: by a forward, a state dict, or the end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from thinwire.engine.arrivals import Arrivals
from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.needs import Needs
from thinwire.engine.order import Profile, send_order
from thinwire.engine.reducer import Launcher
from thinwire.engine.stepper import Stepper
from thinwire.errors import UsageError
from thinwire.wire.base import Work

IN_FLIGHT = 2
"""Pieces under way at once: one on the wire, one ready to follow."""
PROFILED_PASSES = (2, 3, 4)
"""Backward passes whose times decide the order; the first one only counts gradients."""


@dataclass(slots=True)
class Piece:
    """A slice of a bucket's gradient, as a bucket of its own to the strategy."""

    index: int
    gradient: Tensor
    exact_from: int = 0
    """All of it: only AllReduce sends pieces."""


@dataclass(slots=True)
class _Load:
    """One bucket on its way from backward to its update."""

    bucket: ParameterBucket
    pieces: list[Piece]
    works: list[Work] = field(default_factory=list)
    full: bool = False
    reduced: bool = False
    """Sent, or being sent, and not yet applied."""
    weighted: bool = False
    """Still to be divided by how much the workers counted."""
    to_step: bool = False
    """`optimizer.step()` was called since."""
    missed: bool = False
    """Its last update was not asked for by the forward of this pass."""
    full_s: list[float] = field(default_factory=list)


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
        self.weighted = False
        self._stepper = Stepper(optimizer)
        self.arrivals = Arrivals(buckets, self, announce=True)
        self._model = model
        self._optimizer = optimizer
        self._launcher = launcher
        self._clock = clock
        self._needs = Needs(model, buckets, self._need)
        self._loads = [_Load(b, _cut(b, piece_bytes)) for b in buckets]
        self._order = [(b, p) for b, load in enumerate(self._loads) for p in range(len(load.pieces))]
        self._lock = threading.Lock()
        self._issued = 0
        self._flying = 0
        self._pass = 0
        self._began_s = 0.0
        self._piece_s: list[tuple[int, float]] = []
        self._pending = False
        self._handles: list[RemovableHandle] = []

    def parcels(self) -> list[Tensor]:
        """What goes over the wire in one pass."""
        return [piece.gradient for load in self._loads for piece in load.pieces]

    def foresee(self, order: Sequence[int]) -> None:
        """In which order buckets will be needed, for whoever lets no forward be watched."""
        self._needs.order[:] = order

    def hook(self) -> None:
        self.arrivals.hook()
        self._needs.hook()
        for module in self._model.modules():
            self._handles.append(module.register_state_dict_pre_hook(lambda *_: self.settle()))
            self._handles.append(module.register_load_state_dict_pre_hook(lambda *_: self.settle()))
        self._handles.append(self._optimizer.register_state_dict_pre_hook(lambda *_: self.settle()))
        self._handles.append(self._optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()))

    def unhook(self) -> None:
        self.arrivals.unhook()
        self._needs.unhook()
        self._stepper.unmark()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- backward: send ----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        for load in self._loads:
            load.missed = load.to_step
        self.settle()
        if any(load.reduced for load in self._loads):
            raise UsageError(
                "a second backward before optimizer.step()",
                hint="accumulate inside link.no_sync(), or use AllReduce(overlap='backward')",
            )
        self._begin()
        self._launcher.send_buffers()

    def _begin(self) -> None:
        self._pass += 1
        if self._pass == PROFILED_PASSES[-1] + 1:
            self._order = self._launcher.agree(self._best_order())
        self._issued = 0
        self._began_s = self._clock()
        for load in self._loads:
            load.full, load.works = False, [Work() for _ in load.pieces]

    def bucket_is_full(self, index: int) -> None:
        load = self._loads[index]
        load.bucket.gather_(self.weight)
        load.weighted = self.weighted
        if load.missed and any(p.grad is not None for p in load.bucket.parameters):
            raise UsageError(
                f"one of {', '.join(load.bucket.names)} was used before its update, without its module",
                hint="call modules rather than using their weights, or use AllReduce(overlap='backward')",
            )
        for parameter in load.bucket.parameters:
            parameter.grad = None  # the engine owns it now; whoever still looks for it finds nothing
        self._ready(load)

    def backward_ends(self) -> None:
        for load in self._loads:
            if not load.full:
                self.bucket_is_full(load.bucket.index)
        self.weight = 1.0

    def _ready(self, load: _Load) -> None:
        load.full = load.reduced = True
        if self._pass in PROFILED_PASSES:
            load.full_s.append(self._clock() - self._began_s)
        self._issue()

    def _issue(self) -> None:
        """Send the next pieces of the agreed order, if they are ready and the wire is free."""
        with self._lock:
            while self._issued < len(self._order) and self._flying < IN_FLIGHT:
                index, part = self._order[self._issued]
                load = self._loads[index]
                if not load.full:
                    return
                self._issued += 1
                self._flying += 1
                self._launch(load, part)

    def _launch(self, load: _Load, part: int) -> None:
        began_s, piece, work = self._clock(), load.pieces[part], load.works[part]
        task = self._launcher.reduce(piece)

        def ended() -> None:
            if self._pass in PROFILED_PASSES:
                self._piece_s.append((piece.gradient.nbytes, self._clock() - began_s))
            work.fail(task.error) if task.error else work.finish()
            with self._lock:
                self._flying -= 1
            self._issue()

        # Not here and now: the lock is held, and the task may have ended already.
        task.when_done(lambda: self._launcher.soon(ended))

    def _best_order(self) -> list[tuple[int, int]]:
        """From this worker's times; rank 0's is what all of them use."""
        total_bytes = sum(num_bytes for num_bytes, _ in self._piece_s)
        # Pieces overlap, so a piece's own time counts the wire IN_FLIGHT times.
        per_byte_s = sum(s for _, s in self._piece_s) / max(total_bytes, 1) / IN_FLIGHT
        place = {bucket: n for n, bucket in enumerate(self._needs.order)}
        profiles = [
            Profile(
                ready_s=sorted(load.full_s)[len(load.full_s) // 2] if load.full_s else 0.0,
                need=place.get(index, -1),
                piece_s=tuple(piece.gradient.nbytes * per_byte_s for piece in load.pieces),
            )
            for index, load in enumerate(self._loads)
        ]
        return send_order(profiles)

    # -- step and forward: apply -------------------------------------------------------------------

    def check_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepper.check_call(args, kwargs)

    def record_step(self) -> None:
        """What `optimizer.step()` does: nothing yet."""
        self._stepper.record()
        for load in self._loads:
            load.to_step = load.reduced
        self._pending = any(load.to_step for load in self._loads)

    def _need(self, indices: Iterable[int]) -> None:
        for work in self.needing(indices):
            self._launcher.wait(work)

    def needing(self, indices: Iterable[int]) -> Iterator[Work]:
        """What to wait for, one after another, until these buckets are up to date."""
        if self._pending:
            yield from self._launcher.receiving_buffers()
            for index in indices:
                yield from self._applying(self._loads[index])

    def settle(self) -> None:
        """Finish every step that was asked for."""
        if self._pending:
            self._need(range(len(self._loads)))
            self._pending = False

    def _applying(self, load: _Load) -> Iterator[Work]:
        if not load.to_step:
            return
        yield from load.works
        # An evaluation may ask for it in inference mode, in which optimizer state must not be made.
        with torch.inference_mode(False), torch.no_grad():
            self._lend(load)
            load.to_step = load.reduced = False
            self._stepper.step(load.bucket)
        for parameter in load.bucket.parameters:
            parameter.grad = None

    def _lend(self, load: _Load) -> None:
        """Show the reduced gradients, which are there, as the parameters' own, without a copy."""
        load.bucket.lend_(weighted=load.weighted)
        load.weighted = False

    def reducing(self) -> Iterator[Work]:
        """What to wait for before gradients can be clipped."""
        return (work for load in self._loads if load.reduced for work in load.works)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> Tensor:
        """torch's own clipping, over the reduced gradients."""
        for work in self.reducing():
            self._launcher.wait(work)
        for load in self._loads:
            if load.reduced:
                self._lend(load)
        parameters = [p for load in self._loads for p in load.bucket.parameters]
        norm: Tensor = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        for parameter in parameters:
            parameter.grad = None
        return norm

    def shadow(self) -> float:
        """Take part in the others' reduction with nothing to add; how much they counted, on average."""
        self.settle()
        self._begin()
        self._launcher.send_buffers()
        for load in self._loads:
            load.bucket.gradient.zero_()
            self._ready(load)
        for work in chain(self.reducing(), self._launcher.receiving_buffers()):
            self._launcher.wait(work)
        for load in self._loads:
            load.reduced = False
        return self._loads[0].bucket.mean_weight()


def _cut(bucket: ParameterBucket, piece_bytes: int) -> list[Piece]:
    size = max(1, piece_bytes // bucket.gradient.element_size())
    return [Piece(bucket.index, part) for part in bucket.gradient.split(size)]
