"""The arithmetic of collectives where all workers are in one process: the same bits whoever asks.

Sums are taken in order of rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from thinwire.traffic import Op


def settle(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, source: int = 0) -> None:
    """Do the operation for everybody, now that everybody has come; both lists are in order of rank.

    An output is its own input (all-reduce, broadcast) or shares no memory with any.
    """
    world_size = len(inputs)
    if op == "broadcast":
        for rank, out in enumerate(outputs):
            if rank != source:
                out.copy_(inputs[source].detach())
    elif op == "all_gather":
        for out in outputs:
            for part, data in zip(out.view(-1).chunk(world_size), inputs, strict=True):
                part.copy_(data.detach().view(-1))
    elif op == "all_to_all":
        sent = [data.detach().view(-1).chunk(world_size) for data in inputs]
        for rank, out in enumerate(outputs):
            for part, parts in zip(out.view(-1).chunk(world_size), sent, strict=True):
                part.copy_(parts[rank])
    else:
        total = inputs[0].detach().clone()
        for data in inputs[1:]:
            total += data.detach()
        shares = [total] * world_size if op == "all_reduce" else list(total.view(-1).chunk(world_size))
        for out, part in zip(outputs, shares, strict=True):
            out.copy_(part.view_as(out))
