"""Watches backward: which gradients have arrived, when a bucket is full, when the pass is over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from thinwire.engine.buckets import ParameterBucket
from thinwire.errors import UsageError


class Listener(Protocol):
    """What is told of a backward pass, in the thread that runs it."""

    def backward_begins(self) -> None: ...
    def bucket_is_full(self, index: int) -> None: ...
    def backward_ends(self) -> None: ...


@dataclass(slots=True)
class _Slot:
    """One parameter: how often its gradient arrives in a backward pass, and has so far."""

    bucket: ParameterBucket
    place: int
    """Among the bucket's parameters."""
    copies: bool
    """Whether the bucket takes the gradient as soon as it arrives."""
    expected: int = 0
    arrived: int = 0


@dataclass(slots=True, weakref_slot=True)
class _Pass:
    """One backward pass. Only the graphs it runs in hold it, so it goes with them when they fail."""

    graphs: set[int] = field(default_factory=set)


class BackwardHooks:
    """Turns the gradients of one model into "begins", "bucket is full" and "ends".

    The first backward pass only counts how often each gradient arrives (reentrant checkpointing
    brings some of them several times); from the second on, full buckets are announced. A bucket
    with a parameter that this pass does not use is never full.
    """

    def __init__(
        self,
        buckets: Sequence[ParameterBucket],
        listener: Listener,
        *,
        announce: bool,
        others: Sequence[Tensor] = (),
    ) -> None:
        """`others`: parameters that are in no bucket, but show that a pass is under way."""
        self.active = True
        """False inside no_sync: gradients only accumulate."""
        self.check: Callable[[], None] = lambda: None
        """Called before a pass, to refuse it."""
        self._buckets = buckets
        self._listener = listener
        self._announce = announce
        self._others = others
        self._slots = [
            [_Slot(bucket, place, copies) for place, copies in enumerate(bucket.takes)] for bucket in buckets
        ]
        self._missing = [0] * len(buckets)
        self._full = 0
        self._pass: weakref.ref[_Pass] | None = None
        self._graph = -1
        """The graph that the last gradient came from."""
        self._counted = False
        self._handles: list[RemovableHandle] = []

    def hook(self) -> None:
        for bucket, slots in zip(self._buckets, self._slots, strict=True):
            for parameter, slot in zip(bucket.parameters, slots, strict=True):
                handle = parameter.register_post_accumulate_grad_hook(partial(self._arrived, slot))
                self._handles.append(handle)
        for parameter in self._others:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._other_arrived))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _arrived(self, slot: _Slot, _: Tensor) -> None:
        if not self.active:
            return
        if torch._C._current_graph_task_id() != self._graph:
            self._enter()
        missing, bucket = self._missing, slot.bucket
        if missing[bucket.place] == 0:
            raise UsageError(
                f"the gradient of {bucket.names[slot.place]} arrived again after its bucket was sent",
                hint="use checkpoint(..., use_reentrant=False), or overlap='none'",
            )
        slot.arrived += 1
        if not self._counted or slot.arrived < slot.expected:
            return
        if slot.copies:
            bucket.take_(slot.place)
        if self._announce and slot.arrived == slot.expected:
            missing[bucket.place] -= 1
            if missing[bucket.place] == 0:
                self._full += 1
                self._listener.bucket_is_full(bucket.place)

    def _other_arrived(self, _: Tensor) -> None:
        if self.active:
            self._enter()

    def _enter(self) -> None:
        """Notice which pass and graph this is, and ask to be called when the graph ends."""
        current = self._pass() if self._pass is not None else None
        if current is None:
            if self._full:
                raise UsageError(
                    f"{self._full} of {len(self._buckets)} buckets were sent when backward failed",
                    hint="other workers have gone on with them, so it cannot be repeated: attach again",
                )
            current = _Pass()
            self._pass = weakref.ref(current)
            self._begin()
        self._graph = torch._C._current_graph_task_id()
        if self._graph not in current.graphs:
            current.graphs.add(self._graph)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._graph_ends, current))

    def _begin(self) -> None:
        self.check()
        for slots in self._slots:
            for slot in slots:
                slot.arrived = 0
        for bucket in self._buckets:
            bucket.forget()
        self._missing = [len(slots) for slots in self._slots]
        self._listener.backward_begins()

    def _graph_ends(self, current: _Pass) -> None:
        around = cast("Node | None", torch._C._current_autograd_node())  # torch's stub forgets None
        if around is None:
            self._end()
            return
        # A nested backward of reentrant checkpointing has ended, and nothing calls us when the one around
        # it does. What runs next in that one is the checkpoint's input, so that asks for the call.
        follower = next(node for node, _ in around.next_functions if node is not None)

        def enter(*_: object, keep: _Pass = current) -> None:
            handle.remove()
            if self._pass is not None and self._pass() is keep:
                self._enter()

        handle = follower.register_prehook(enter)

    def _end(self) -> None:
        self._pass = None
        self._full = 0
        self._listener.backward_ends()
        for slots in self._slots:
            for slot in slots:
                slot.expected = max(slot.expected, slot.arrived)
        self._counted = True
