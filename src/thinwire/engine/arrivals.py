"""Watches backward: which gradients have arrived, when a bucket is full, when the pass is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
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

    name: str
    bucket: int
    expected: int = 0
    arrived: int = 0


class Arrivals:
    """Turns the gradients of one model into "begins", "bucket is full" and "ends".

    The first backward pass only counts how often each gradient arrives (reentrant checkpointing
    brings some of them several times); from the second on, full buckets are announced. A bucket
    with a parameter that this pass does not use is never full.
    """

    def __init__(self, buckets: Sequence[ParameterBucket], listener: Listener, *, announce: bool) -> None:
        self.active = True
        """False inside no_sync: gradients only accumulate."""
        self._buckets = buckets
        self._listener = listener
        self._announce = announce
        self._slots = [[_Slot(name, bucket.index) for name in bucket.names] for bucket in buckets]
        self._missing = [0] * len(buckets)
        self._graphs: set[int] = set()
        self._counted = False
        self._handles: list[RemovableHandle] = []

    def hook(self) -> None:
        for bucket, slots in zip(self._buckets, self._slots, strict=True):
            for parameter, slot in zip(bucket.parameters, slots, strict=True):
                handle = parameter.register_post_accumulate_grad_hook(partial(self._arrived, slot))
                self._handles.append(handle)

    def unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _arrived(self, slot: _Slot, _: Tensor) -> None:
        if not self.active:
            return
        graph = torch._C._current_graph_task_id()
        if graph not in self._graphs:
            if not self._graphs:
                self._begin()
            self._graphs.add(graph)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._graph_ends, graph))
        if self._missing[slot.bucket] == 0:
            raise UsageError(
                f"the gradient of {slot.name} arrived again after its bucket was sent",
                hint="use checkpoint(..., use_reentrant=False), or overlap='none'",
            )
        slot.arrived += 1
        if self._counted and self._announce and slot.arrived == slot.expected:
            self._missing[slot.bucket] -= 1
            if self._missing[slot.bucket] == 0:
                self._listener.bucket_is_full(slot.bucket)

    def _begin(self) -> None:
        for slots in self._slots:
            for slot in slots:
                slot.arrived = 0
        self._missing = [len(slots) for slots in self._slots]
        self._listener.backward_begins()

    def _graph_ends(self, graph: int) -> None:
        self._graphs.discard(graph)
        if self._graphs:
            return  # a nested backward of reentrant checkpointing has ended
        for slots in self._slots:
            for slot in slots:
                slot.expected = max(slot.expected, slot.arrived)
        self._counted = True
        self._listener.backward_ends()
