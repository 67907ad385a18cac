"""Batch-norm statistics and other buffers: rank 0's, their mean, or each worker's own."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.engine import replicas
from thinwire.engine.driver import Task
from thinwire.engine.endpoint import Make
from thinwire.wire.base import Lane
from thinwire.wire.wire import Wire
from thinwire.wire.work import Work

BufferPolicy = Literal["rank0", "average", "local"]


class Buffers:
    """Sends the buffers beside the gradients of the same step: rank 0's as bytes, means by dtype."""

    def __init__(self, model: nn.Module, policy: BufferPolicy, lane: Lane) -> None:
        # The dicts that hold them, as walking the model in every step is slow and a buffer may be replaced.
        self._homes = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        self._policy = policy
        self._lane = lane
        self._held: list[Tensor | None] = []
        self._buffers: list[Tensor] = []
        self._messages: list[_Message] = []
        self._task: Task | None = None
        self._source = 0
        self.joining = False
        """Whether workers may have run out of data, so that it has to be asked whose buffers count."""
        self.present = True
        """Whether this worker still has data."""

    @torch.no_grad()
    def send(self, start: Callable[[Make, str], Task]) -> None:
        """When backward begins forward is over, so the buffers are those of this step."""
        if self._policy == "local" or self._lane.world_size == 1:
            return
        if self._task is not None:
            return  # sent by a backward that failed before its gradients were; this one repeats it
        self._prepare()
        if self._policy == "average" or self.joining or self._lane.rank == 0:
            for message in self._messages:
                torch._foreach_copy_(message.views, message.buffers)
        if self._messages:
            self._task = start(self._sync, "buffers")

    def forget(self) -> None:
        """Buffers have other shapes now: lay out messages anew."""
        self._held = []

    def _prepare(self) -> None:
        """Lay out messages, unless the buffers are still those of the last step."""
        held = [home.get(name) for home, name in self._homes]
        if len(held) == len(self._held) and all(map(operator.is_, held, self._held)):
            return
        self._held, self._buffers = held, list({id(b): b for b in held if b is not None}.values())
        if self._policy == "rank0":
            # The wide ones first: so each begins at a multiple of its width.
            wide_first = sorted(self._buffers, key=lambda b: -b.element_size())
            groups = replicas.chunks(wide_first, mixed=True)
        else:
            groups = replicas.chunks(b for b in self._buffers if b.is_floating_point())
        self._messages = [
            _Message(group, torch.uint8 if self._policy == "rank0" else None) for group in groups
        ]

    async def _sync(self, wire: Wire) -> None:
        present = list(range(wire.world_size))
        if self.joining:
            mine = torch.tensor([self.present], dtype=torch.uint8)
            everyones = mine.new_empty(wire.world_size)
            await wire.all_gather(mine, everyones)
            present = [rank for rank in present if everyones[rank]]
            if not present:
                return
        self._source = present[0]
        for flat in (message.flat for message in self._messages):
            if self._policy == "rank0":
                await wire.broadcast_(flat, source=self._source)
            else:
                flat *= float(self.present)
                await wire.all_reduce_(flat)
                flat /= len(present)

    def receiving(self) -> Iterator[Work]:
        """What to wait for, only when backward has ended: it may still have needed the old values."""
        if self._task is None:
            return
        task, self._task = self._task, None
        yield task
        if self._policy == "rank0" and self._source == self._lane.rank:
            return
        with torch.no_grad():
            for message in self._messages:
                torch._foreach_copy_(message.buffers, message.views)


class _Message:
    """Buffers of one device in one flat tensor: as bytes, or in the dtype they have in common."""

    def __init__(self, buffers: list[Tensor], dtype: torch.dtype | None) -> None:
        self.buffers = buffers
        dtype = dtype or buffers[0].dtype
        sizes = [b.nbytes // dtype.itemsize for b in buffers]
        self.flat = torch.empty(sum(sizes), dtype=dtype, device=buffers[0].device)
        parts = self.flat.split(sizes)
        self.views = [part.view(b.dtype).view(b.shape) for part, b in zip(parts, buffers, strict=True)]
