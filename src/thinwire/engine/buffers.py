"""Batch-norm statistics and other buffers: rank 0's, their mean, or each worker's own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinwire.engine import replicas
from thinwire.engine.driver import Task
from thinwire.wire.base import Wire, Work

BufferPolicy = Literal["rank0", "average", "local"]


class Buffers:
    """Sends the buffers beside the gradients of the same step, in one message per dtype."""

    def __init__(self, model: nn.Module, policy: BufferPolicy, wire: Wire) -> None:
        # The dicts that hold them, as walking the model in every step is slow and a buffer may be replaced.
        self._homes = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        self._policy = policy
        self._wire = wire
        self._groups: list[list[Tensor]] = []
        self._flats: list[Tensor] = []
        self._task: Task | None = None
        self.joining = False
        """Whether workers may have run out of data, so that it has to be asked whose buffers count."""
        self.present = True
        """Whether this worker still has data."""

    def send(self, start: Callable[[Coroutine[Any, Any, None], str], Task]) -> None:
        """When backward begins forward is over, so the buffers are those of this step."""
        if self._policy == "local" or self._wire.world_size == 1:
            return
        if self._task is not None:
            return  # sent by a backward that failed before its gradients were; this one repeats it
        every = self._policy == "rank0"
        present = {id(b): b for home, name in self._homes if (b := home.get(name)) is not None}
        self._groups = replicas.chunks(b for b in present.values() if every or b.is_floating_point())
        self._flats = [torch.cat([b.detach().reshape(-1) for b in group]) for group in self._groups]
        if self._groups:
            self._task = start(self._sync(), "buffers")

    async def _sync(self) -> None:
        present = torch.ones(self._wire.world_size, dtype=torch.uint8)
        if self.joining:
            mine = torch.tensor([self.present], dtype=torch.uint8)
            await self._wire.all_gather(mine, present)
            if not present.any():
                return
        for flat in self._flats:
            if self._policy == "rank0":  # that is, of the lowest rank that still has data
                await self._wire.broadcast_(flat.view(torch.uint8), source=int(present.argmax()))
            else:
                flat *= float(self.present)
                await self._wire.all_reduce_(flat)
                flat /= int(present.sum())

    @torch.no_grad()
    def receive(self, wait: Callable[[Work], None]) -> None:
        """Only when backward has ended: it may still have needed the old values."""
        if self._task is None:
            return
        task, self._task = self._task, None
        wait(task)
        for buffers, flat in zip(self._groups, self._flats, strict=True):
            parts = flat.split([b.numel() for b in buffers])
            torch._foreach_copy_(buffers, [p.view(b.shape) for p, b in zip(parts, buffers, strict=True)])
