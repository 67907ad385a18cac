"""Strip-owned updates: each worker reduces, steps and keeps the optimizer state of one strip of every bucket.

Das et al. (2016, arXiv:1602.06709): part-reduce gives every worker the summed gradients of its strip, the
optimizer runs once per strip and not once per worker, and part-broadcast gives the new weights to all, hidden
behind the next forward up to the layer that needs them. It sends as many bytes as an all-reduce, and the
optimizer needs 1 / P of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.engine.backward_hooks import BackwardHooks
from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.clipping import GradientPart
from thinwire.engine.driver import Task
from thinwire.engine.endpoint import Make
from thinwire.engine.forward_hooks import ForwardHooks, is_compiled
from thinwire.engine.pending_gradient import PendingGradient
from thinwire.engine.refusal import Refusal
from thinwire.engine.state_access import StateAccessHooks
from thinwire.engine.strips import OwnedGroups, Strip, StripPiece, check_elementwise
from thinwire.errors import UsageError
from thinwire.strategies.base import Overlap
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work, in_background


class StripLauncher(Protocol):
    """How strips are sent and awaited; the core supplies it."""

    @property
    def refusal(self) -> Refusal: ...
    def start_reducing(self, place: int, make: Make, name: str) -> Task: ...
    def position(self, place: int) -> tuple[int, int]: ...
    def send_buffers(self) -> None: ...
    def receiving_buffers(self) -> Iterator[Work]: ...
    def wait_for(self, works: Iterable[Work]) -> None: ...


class ShardedReducer:
    """Gradients of own strips are final when `backward()` returns; weights arrive during the next forward."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        buckets: Sequence[ParameterBucket],
        overlap: Overlap,
        launcher: StripLauncher,
    ) -> None:
        check_elementwise(optimizers)
        self.weight = 1.0
        self.hooks = BackwardHooks(buckets, self, announce=overlap == "backward")
        self._launcher = launcher
        self._buckets = buckets
        self.strips = [Strip(bucket, *launcher.position(bucket.place)) for bucket in buckets]
        self.owned = OwnedGroups(optimizers, self.strips)
        self._forward_hooks = None if is_compiled(model) else ForwardHooks(model, buckets, self._need)
        self._access_hooks = StateAccessHooks(
            model, optimizers, finish=self.finish, drop=self._drop, owner_of_gradients="sharded=True"
        )
        self._full: set[int] = set()
        self._reducing: list[Task] = []
        self._gathering: dict[int, tuple[Task, Tensor]] = {}
        """By bucket: weights on their way here."""
        self._guards = [
            [
                None if view is None else PendingGradient.of(view, _refuse_look)
                for view in bucket.plain_views()
            ]
            for bucket in buckets
        ]

    @property
    def pieces(self) -> list[StripPiece]:
        return [piece for strip in self.strips for piece in strip.pieces]

    def gradient_parts(self) -> list[GradientPart]:
        """The gradients of the strips that this worker updates, and nobody else."""
        owned = [piece.parameter.grad for piece in self.pieces]
        return [GradientPart(gradient, num_holders=1) for gradient in owned if gradient is not None]

    def hook(self) -> None:
        for strip in self.strips:
            strip.read_()
        self.owned.put_in()
        self.hooks.hook()
        if self._forward_hooks is not None:
            self._forward_hooks.hook()
        self._access_hooks.hook(self._forward_hooks.handles if self._forward_hooks is not None else [])

    def unhook(self) -> None:
        self.hooks.unhook()
        if self._forward_hooks is not None:
            self._forward_hooks.unhook()
        self._access_hooks.unhook()
        self.owned.take_out()

    # -- backward: reduce-scatter ---------------------------------------------------------------------

    def backward_begins(self) -> None:
        self.finish()
        self._full.clear()
        self._reducing.clear()
        self._launcher.send_buffers()

    def bucket_is_full(self, index: int) -> None:
        self._full.add(index)
        while len(self._reducing) in self._full:
            self._send()

    def backward_ends(self) -> None:
        self._launcher.wait_for(self._finishing())

    def _finishing(self) -> Iterator[Work]:
        while len(self._reducing) < len(self._buckets):
            self._send()
        for task, strip in zip(self._reducing, self.strips, strict=True):
            yield task
            strip.give_gradients_()
        yield from self._launcher.receiving_buffers()
        if (yield from self._launcher.refusal.elsewhere()):
            for strip in self.strips:
                grads = [piece.parameter.grad for piece in strip.pieces]
                strip.bucket.refuse_(grad for grad in grads if grad is not None)
        self.weight = 1.0

    def _send(self) -> None:
        place = len(self._reducing)
        bucket, strip, guards = self._buckets[place], self.strips[place], self._guards[place]
        for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
            if isinstance(parameter.grad, PendingGradient):
                raise UsageError(
                    f"a second backward before optimizer.step() has added to the gradient of {name}",
                    hint="accumulate inside link.no_sync(), or drop gradients with optimizer.zero_grad()",
                )
        bucket.gather_(self.weight)
        for parameter, guard in zip(bucket.parameters, guards, strict=True):
            parameter.grad = guard if parameter.requires_grad else None

        async def reduce(wire: Wire) -> None:
            await in_background()
            message = strip.message()
            reduced = message.new_empty(message.numel() // strip.world_size)
            await wire.reduce_scatter(message, reduced)
            strip.take_(reduced.div_(strip.world_size))

        self._reducing.append(self._launcher.start_reducing(place, reduce, f"reduce {place}"))

    # -- step: all-gather -----------------------------------------------------------------------------

    def check_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(a) for a in (*args[1:], *kwargs.values())):
            raise UsageError("sharded=True cannot step with a closure", hint="use sharded=False")
        self.finish()
        self._drop_guards()
        for strip in self.strips:
            strip.read_()

    def record_step(self) -> None:
        """The own strips were stepped: give them to all, lowest layer first."""
        for strip in reversed(self.strips):
            self._gather(strip)
        if self._forward_hooks is None:
            self.finish()

    def _gather(self, strip: Strip) -> None:
        everyones = strip.values.new_empty(strip.world_size * strip.width)

        async def gather(wire: Wire) -> None:
            await in_background()
            await wire.all_gather(strip.values, everyones)

        place = strip.bucket.place
        self._gathering[place] = self._launcher.start_reducing(place, gather, f"gather {place}"), everyones

    def _need(self, places: Iterable[int]) -> None:
        if self._gathering:
            self._launcher.wait_for(self._arriving(places))

    def _arriving(self, places: Iterable[int]) -> Iterator[Work]:
        for place in places:
            if place in self._gathering:
                task, everyones = self._gathering[place]
                yield task
                del self._gathering[place]
                with torch.inference_mode(False):
                    bucket = self._buckets[place]
                    bucket.write_(everyones[: bucket.num_parameters])

    def stepping(self) -> Iterator[Work]:
        """What to wait for until all weights are here."""
        return self._arriving(list(self._gathering))

    def finish(self) -> None:
        """Have all weights here."""
        self._need(list(self._gathering))

    # -- gradients ------------------------------------------------------------------------------------

    def reducing(self) -> Iterator[Work]:
        return iter(())

    def gradients(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _drop_guards(self) -> None:
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                if isinstance(parameter.grad, PendingGradient):
                    parameter.grad = None

    def _drop(self) -> None:
        """What zero_grad does."""
        self._drop_guards()
        for piece in self.pieces:
            piece.parameter.grad = None

    def reduce_nothing(self) -> float:
        raise UsageError(
            "sharded=True has no join: a worker that has left would not update its strip",
            hint="give all workers equal numbers of batches, such as DataLoader(..., drop_last=True)",
        )

    def give_back(self) -> None:
        self._drop()


def _refuse_look() -> None:
    raise UsageError(
        "sharded=True leaves each worker the gradients of its strip only, and none of whole parameters",
        hint="clip with link.clip_grad_norm_(...), or use sharded=False",
    )
