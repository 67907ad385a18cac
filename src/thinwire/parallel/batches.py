"""Workers of a group need batches of one shape: what keeps unequal ones from reaching the wire.

Gloo ends the whole process, with no Python error, when a message is larger than its receiver expects. So the
workers of a group compare shapes first. One small all-gather, started when the model's forward begins, tells
whether all have inputs of shapes that they had before. Only if not, every split layer compares its own input
in that forward, and can be named.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from thinwire.errors import PeerLost, UsageError

GONE_HINT = "another worker of the group is gone: look for the first error among all workers"
_MOST_DIMS = 8


class EqualBatches:
    """Compares shapes among the workers of one group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._ranks = dist.get_process_group_ranks(group)
        self._arriving: tuple[Any, Tensor] | None = None
        """The all-gather of a forward that has begun, and its result."""
        self._inputs: tuple[int, ...] | None = None
        """What identifies everyone's inputs of the forward under way; None between forwards."""
        self._compared: set[tuple[int, ...]] = set()
        """Inputs with which a whole forward went well: a layer's shapes follow from the model's."""

    def hook(self, model: nn.Module) -> None:
        """Compare inputs at the beginning of each forward of `model`."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)

    def check(self, layer: str, x: Tensor) -> None:
        """Called by all workers of the group, with the input of a layer that they share."""
        self._arrive()
        if self._inputs not in self._compared:
            self._compare(layer, x)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._arrive()  # of a forward that was not finished
        shapes = [(tuple(x.shape), x.dtype) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        mine = torch.tensor([crc32(repr((module.training, shapes)).encode())], device=self._device)
        everyones = mine.new_empty(len(self._ranks))
        self._arriving = self._group._allgather_base(everyones, mine), everyones  # torch renames its function

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._arrive()
        if self._inputs is not None:
            self._compared.add(self._inputs)
        self._inputs = None

    def _arrive(self) -> None:
        if self._arriving is not None:
            work, everyones = self._arriving
            self._arriving = None
            _wait(work)
            self._inputs = tuple(everyones.tolist())

    def _compare(self, layer: str, x: Tensor) -> None:
        dims = list(x.shape)[:_MOST_DIMS]
        padded = dims + [0] * (_MOST_DIMS - len(dims))
        mine = torch.tensor([*padded, len(dims), crc32(str(x.dtype).encode())], device=self._device)
        everyones = mine.new_empty(len(self._ranks) * mine.numel())
        _wait(self._group._allgather_base(everyones, mine))
        told = everyones.view(len(self._ranks), -1).tolist()
        if all(each == told[0] for each in told):
            return
        shapes = [tuple(each[: each[-2]]) for each in told]
        if len(set(shapes)) > 1:
            words = ", ".join(f"{s} on worker {r}" for r, s in zip(self._ranks, shapes, strict=True))
            raise UsageError(
                f"{layer}: the workers of its group have inputs of different shapes: {words}",
                hint="a split layer needs equal batches: DataLoader(..., drop_last=True), or pad them",
            )
        raise UsageError(
            f"{layer}: the workers of its group have inputs of different types, here {x.dtype}",
            hint="use the same dtype, or the same autocast, on all workers",
        )


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost(f"a group could not compare its workers' batches: {error}", hint=GONE_HINT) from error
