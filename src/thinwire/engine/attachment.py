"""What a link puts on a user's model and optimizers, and takes off again: hooks, and watches for misuse."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.arguments import linked
from thinwire.engine.core import Core
from thinwire.engine.parameter_watch import ParameterWatch
from thinwire.engine.scaled_steps import ScaledSteps
from thinwire.engine.sharded_reducer import ShardedReducer
from thinwire.engine.state_access import StateAccessHooks
from thinwire.engine.step_hooks import IdleWatch, StepHooks
from thinwire.engine.transport import Transport
from thinwire.errors import UsageError
from thinwire.strategies.base import overrides


class Attachment:
    """Hooks on one model and its optimizers; those on gradients are made anew with the buckets."""

    def __init__(
        self, core: Core, transport: Transport, *, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """`before` is called before each optimizer step, when its gradients are there, and `after` it."""
        self._model, self._optimizers = core.model, core.optimizers
        self._mixes = overrides(core.strategy, "mix")
        distributed = core.lane.world_size > 1
        self._step_hooks = StepHooks(self._optimizers, check=self._check_step, before=before, after=after)
        self._access_hooks = StateAccessHooks(
            self._model,
            self._optimizers,
            finish=lambda: self._transport.wait_for(self._core.mixer.completing_all()),
        )
        self._idle_watch: IdleWatch | None = None
        self._scaled_steps: ScaledSteps | None = None
        if self._mixes:
            self._access_hooks.hook(self._step_hooks.handles)
            if distributed:
                self._scaled_steps = ScaledSteps(self._optimizers)
                self._idle_watch = IdleWatch(self._optimizers, core.strategy)
        self._looks_for_wrapper = distributed and dist.is_initialized()
        self.hook(core, transport)

    def hook(self, core: Core, transport: Transport) -> None:
        """Put hooks on the parameters of these buckets."""
        self._core, self._transport = core, transport
        sent = [*(p for bucket in core.buckets for p in bucket.parameters)]
        sent += [rows.parameter for rows in core.rows]
        self._parameters = {id(p): p for p in sent}
        reducer = core.reducer
        owned = [piece.parameter for piece in reducer.pieces] if isinstance(reducer, ShardedReducer) else []
        held = {id(p) for p in (*sent, *owned)}  # what the optimizers may hold
        self._watch = ParameterWatch(self._model, core.buckets, held)
        if overrides(core.strategy, "reduce"):
            reducer.hooks.check = self._begin_pass
            reducer.hook()
        linked.update((p, True) for p in self._parameters.values())

    def unhook(self) -> None:
        """Take everything off, for good."""
        for parameter in self._parameters.values():
            linked.pop(parameter, None)
        self._core.reducer.unhook()
        self._access_hooks.unhook()
        self._step_hooks.unhook()
        if self._idle_watch is not None:
            self._idle_watch.stop()
        if self._scaled_steps is not None:
            self._scaled_steps.unhook()

    # -- checks -----------------------------------------------------------------------------------

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
