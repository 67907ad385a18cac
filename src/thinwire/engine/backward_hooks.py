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

_graph_under_way = torch._C._current_graph_task_id


class PassListener(Protocol):
    """What is told of a backward pass, in the thread that runs it."""

    def backward_begins(self) -> None: ...
    def bucket_is_full(self, index: int) -> None: ...
    def backward_ends(self) -> None: ...


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
        listener: PassListener,
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
        self._others = others
        self._announce = announce
        self._places = [bucket.place for bucket in buckets for _ in bucket.names]
        """The bucket of each parameter."""
        self._expected = [0] * len(self._places)
        """How often the gradient of each parameter arrives in a backward pass; 0: not known yet."""
        self._left = list(self._expected)
        """How often it has still to arrive in this one."""
        self._missing = [0] * len(buckets)
        self._full = 0
        self._pass: weakref.ref[_Pass] | None = None
        self._graph = -1
        """The graph that the last gradient came from."""
        self._handles: list[RemovableHandle] = []

    def hook(self) -> None:
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        for number, parameter in enumerate(parameters):
            handle = parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))
            self._handles.append(handle)
        for parameter in self._others:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._other_arrived))

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _arrived(self, number: int, _: Tensor) -> None:
        # Called for every gradient, when nothing of it is in the processor's cache: so it touches little.
        if _graph_under_way() != self._graph and not self._enter():
            return
        left = self._left[number] = self._left[number] - 1
        if left > 0 or not self._announce:
            return
        place = self._places[number]
        missing = self._missing[place] = self._missing[place] - (left == 0)
        if left == 0 and missing == 0:
            self._full += 1
            self._listener.bucket_is_full(place)
        elif missing == 0:
            name = [name for bucket in self._buckets for name in bucket.names][number]
            raise UsageError(
                f"the gradient of {name} arrived again after its bucket was sent",
                hint="use checkpoint(..., use_reentrant=False), or overlap='none'",
            )

    def _other_arrived(self, _: Tensor) -> None:
        self._enter()

    def _enter(self) -> bool:
        """Notice which pass and graph this is, and ask to be called when the graph ends; False in a pass that
        only accumulates."""
        if not self.active:
            return False
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
        self._graph = _graph_under_way()
        if self._graph not in current.graphs:
            current.graphs.add(self._graph)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._graph_ends, current))
        return True

    def _begin(self) -> None:
        self.check()
        self._left = list(self._expected)
        self._missing = [len(bucket.names) for bucket in self._buckets]
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
        if min(self._left, default=0) < 0:  # some have arrived more often than ever before
            pairs = zip(self._expected, self._left, strict=True)
            self._expected = [max(expected, expected - left) for expected, left in pairs]
