"""Batch-norm statistics and other buffers: rank 0's, their mean, or each worker's own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinwire.engine import replicas
from thinwire.engine.driver import Task
from thinwire.wire.base import Wire, Work

BufferPolicy = Literal["rank0", "average", "local"]


class Buffers:
    """Sends the buffers beside the gradients of the same step: rank 0's as bytes, means by dtype."""

    def __init__(self, model: nn.Module, policy: BufferPolicy, wire: Wire) -> None:
        # The dicts that hold them, as walking the model in every step is slow and a buffer may be replaced.
        self._homes = [(module._buffers, name) for module in model.modules() for name in module._buffers]
        self._policy = policy
        self._wire = wire
        self._groups: list[list[Tensor]] = []
        self._flats: list[Tensor] = []
        self._task: Task | None = None
        self._source = 0
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
        buffers = {id(b): b for home, name in self._homes if (b := home.get(name)) is not None}.values()
        if self._policy == "rank0":
            # The wide ones first: so each begins at a multiple of its width.
            self._groups = replicas.chunks(sorted(buffers, key=lambda b: -b.element_size()), mixed=True)
            speaks = self.joining or self._wire.rank == 0
            self._flats = [_bytes_of(group) if speaks else _bytes_for(group) for group in self._groups]
        else:
            self._groups = replicas.chunks(b for b in buffers if b.is_floating_point())
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
        self._source = int(present.argmax())  # the lowest rank that still has data
        for flat in self._flats:
            if self._policy == "rank0":
                await self._wire.broadcast_(flat, source=self._source)
            else:
                flat *= float(self.present)
                await self._wire.all_reduce_(flat)
                flat /= int(present.sum())

    def receiving(self) -> Iterator[Work]:
        """What to wait for, only when backward has ended: it may still have needed the old values."""
        if self._task is None:
            return
        task, self._task = self._task, None
        yield task
        if self._policy == "rank0" and self._source == self._wire.rank:
            return
        for buffers, flat in zip(self._groups, self._flats, strict=True):
            parts = flat.split([b.numel() * b.element_size() // flat.element_size() for b in buffers])
            views = [p.view(b.dtype).view(b.shape) for p, b in zip(parts, buffers, strict=True)]
            with torch.no_grad():
                torch._foreach_copy_(buffers, views)


def _bytes_of(buffers: list[Tensor]) -> Tensor:
    return torch.cat([b.detach().reshape(-1).view(torch.uint8) for b in buffers])


def _bytes_for(buffers: list[Tensor]) -> Tensor:
    return torch.empty(sum(b.nbytes for b in buffers), dtype=torch.uint8, device=buffers[0].device)
