"""Watches backward fill the gradients, sends buckets out in order, and is done when backward is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from thinwire.engine.buckets import ParameterBucket
from thinwire.engine.driver import Task
from thinwire.errors import UsageError
from thinwire.strategies.base import Overlap


class Launcher(Protocol):
    """How the reducer starts and awaits communication; the link supplies it."""

    def reduce(self, bucket: ParameterBucket) -> Task: ...
    def backward_begins(self) -> None: ...
    def wait(self, task: Task) -> None: ...
    def backward_ends(self) -> None: ...


@dataclass(slots=True)
class _Slot:
    """One parameter: how often its gradient arrives in a backward pass, and has so far."""

    name: str
    bucket: int
    expected: int = 0
    arrived: int = 0


@dataclass(slots=True, weakref_slot=True)
class _Pass:
    """One backward pass. Only the graphs it runs in hold it, so it goes with them when they fail."""

    graphs: set[int] = field(default_factory=set)


class Reducer:
    """Turns gradient arrivals of one model into reduced gradients.

    The first backward pass only counts how often each gradient arrives (reentrant checkpointing
    brings some of them several times); from the second on, buckets go out as they fill.
    """

    def __init__(self, buckets: Sequence[ParameterBucket], overlap: Overlap, launcher: Launcher) -> None:
        self.weight = 1.0
        self.weighted = False
        """Whether workers count differently in the coming pass: divide by the mean weight."""
        self.active = True
        """False inside no_sync: gradients only accumulate."""
        self._buckets = buckets
        self._launcher = launcher
        self._overlap = overlap
        self._slots = [[_Slot(name, bucket.index) for name in bucket.names] for bucket in buckets]
        self._pass: weakref.ref[_Pass] | None = None
        self._next = 0
        self._missing = [0] * len(buckets)
        self._tasks: list[Task] = []
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
        self._enter()
        slot.arrived += 1
        if slot.bucket < self._next:
            raise UsageError(
                f"the gradient of {slot.name} arrived again after its bucket was sent",
                hint="use checkpoint(..., use_reentrant=False), or overlap='none'",
            )
        if self._counted and self._overlap == "backward" and slot.arrived == slot.expected:
            self._missing[slot.bucket] -= 1
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._send()

    def _enter(self) -> None:
        """Notice which pass and graph this is, and ask to be called when the graph ends."""
        current = self._pass() if self._pass is not None else None
        if current is None:
            if self._tasks:
                raise UsageError(
                    f"{len(self._tasks)} of {len(self._buckets)} buckets were sent when backward failed",
                    hint="other workers have gone on with them, so it cannot be repeated: attach again",
                )
            current = _Pass()
            self._pass = weakref.ref(current)
            self._begin()
        graph = torch._C._current_graph_task_id()
        if graph not in current.graphs:
            current.graphs.add(graph)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._graph_ends, current))

    def _begin(self) -> None:
        self._next = 0
        for slots in self._slots:
            for slot in slots:
                slot.arrived = 0
        self._missing = [len(slots) for slots in self._slots]
        self._launcher.backward_begins()

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.gather_(self.weight)
        self._tasks.append(self._launcher.reduce(bucket))

    def _graph_ends(self, current: _Pass) -> None:
        around = cast("Node | None", torch._C._current_autograd_node())  # torch's stub forgets None
        if around is None:
            self._pass = None
            self._finish()
            return
        # A nested backward of reentrant checkpointing has ended, and nothing calls us when the one around
        # it does. What runs next in that one is the checkpoint's input, so that asks for the call.
        follower = next(node for node, _ in around.next_functions if node is not None)

        def enter(*_: object, keep: _Pass = current) -> None:
            handle.remove()
            if self._pass is not None and self._pass() is keep:
                self._enter()

        handle = follower.register_prehook(enter)

    def _finish(self) -> None:
        try:
            while self._next < len(self._buckets):
                self._send()
            for task, bucket in zip(self._tasks, self._buckets, strict=True):
                self._launcher.wait(task)
                bucket.scatter_(weighted=self.weighted)
            self._launcher.backward_ends()
        finally:
            self._tasks.clear()
            self._next = len(self._buckets)
        for slots in self._slots:
            for slot in slots:
                slot.expected = max(slot.expected, slot.arrived)
        self._counted = True

    def shadow(self) -> float:
        """Take part in the others' reduction with nothing to add; how much they counted, on average."""
        self._begin()
        for bucket in self._buckets:
            bucket.gradient.zero_()
            self._tasks.append(self._launcher.reduce(bucket))
        try:
            for task in self._tasks:
                self._launcher.wait(task)
            self._launcher.backward_ends()
        finally:
            self._tasks.clear()
        return self._buckets[0].mean_weight() if self._buckets else 0.0
