"""Activations between the workers of a group: whole rows on the outside, all the group's rows inside.

Each worker has some rows of the batch with all features. A split layer works on the rows of the whole group:
with all features (gathered, or summed on the way out), or with this worker's strip of them. torch's own
redistribution does the same with more bytes on Gloo: it has no all-to-all there and gathers everything
instead, and its reduce-scatter sends twice what it has to. For layers of 256 x 1024 that is 1.8 times (2
workers) and 2.8 times (4 workers) the bytes these moves need, by the interface counters. So they are made
of all-to-all here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.errors import PeerLost, UsageError
from thinwire.parallel.batches import GONE_HINT, EqualBatches

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ActivationGroup:
    """The workers that share one copy of a layer, and how they pass activations to each other.

    Moves come in pairs of which one is the other's gradient. The loss of each worker is the mean over its own
    rows, so a strip's gradient would be the sum over the group where data parallelism takes the mean: a
    gradient is divided by the size of the group on its way into a split layer, and multiplied on its way out
    of it.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    layer: str
    """Its name, for errors."""
    batches: EqualBatches

    # -- what a layer's input and output hooks call ---------------------------------------------------

    def gather_rows(self, x: Tensor) -> Tensor:
        """Own rows, all features -> all rows, all features."""
        self.batches.check(self.layer, x)
        return _moved(x, self._all_gather, self._reduce_scatter, self.size)

    def sum_to_rows(self, partial: Tensor) -> Tensor:
        """Partial sums for all rows -> their sum over the group, own rows."""
        return _moved(partial, self._reduce_scatter, self._all_gather, 1 / self.size)

    def rows_to_strip(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Own rows, all features -> all rows, own strip of features; `widths` are those of all strips."""
        self.batches.check(self.layer, x)
        return _moved(x, lambda x: self._to_strip(x, widths), lambda g: self._to_rows(g, widths), self.size)

    def strip_to_rows(self, y: Tensor, widths: Sequence[int]) -> Tensor:
        """All rows, own strip of features -> own rows, all features."""
        return _moved(
            y, lambda y: self._to_rows(y, widths), lambda g: self._to_strip(g, widths), 1 / self.size
        )

    # -- on the wire ----------------------------------------------------------------------------------

    def _all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        self._run(lambda: self.group._allgather_base(out, x).wait(), x)  # torch renames its function
        return out

    def _reduce_scatter(self, x: Tensor) -> Tensor:
        self._check_rows(x)
        parts = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._run(lambda: dist.all_to_all_single(parts, x.contiguous(), group=self.group), x)
        return parts.view(self.size, len(x) // self.size, *x.shape[1:]).sum(0)

    def _to_strip(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        num_rows = x.shape[:-1].numel()
        sent = torch.cat([part.reshape(-1) for part in x.split(list(widths), dim=-1)])
        mine = widths[self.rank]
        out = x.new_empty(self.size * len(x), *x.shape[1:-1], mine)
        self._exchange(out.view(-1), sent, [num_rows * mine] * self.size, [num_rows * w for w in widths])
        return out

    def _to_rows(self, y: Tensor, widths: Sequence[int]) -> Tensor:
        self._check_rows(y)
        shape = (len(y) // self.size, *y.shape[1:-1])
        num_rows = torch.Size(shape).numel()
        received = y.new_empty(num_rows * sum(widths))
        sizes = [num_rows * width for width in widths]
        self._exchange(received, y.reshape(-1), sizes, [num_rows * widths[self.rank]] * self.size)
        parts = received.split(sizes)
        return torch.cat([part.view(*shape, w) for part, w in zip(parts, widths, strict=True)], dim=-1)

    def _exchange(self, out: Tensor, x: Tensor, received: list[int], sent: list[int]) -> None:
        self._run(lambda: dist.all_to_all_single(out, x, received, sent, group=self.group), x)

    def _check_rows(self, x: Tensor) -> None:
        if len(x) % self.size:
            raise UsageError(
                f"{self.layer} has {len(x)} rows for the {self.size} workers of its group",
                hint="a split layer must keep the batch in its first dimension",
            )

    def _run(self, operation: Callable[[], Any], x: Tensor) -> None:
        try:
            operation()
        except RuntimeError as error:
            raise PeerLost(
                f"{self.layer}: its group could not pass on activations of shape {tuple(x.shape)}: {error}",
                hint=GONE_HINT,
            ) from error


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move, scale: float) -> Any:
        ctx.back, ctx.scale = back, scale
        return there(x)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        (gradient,) = outputs
        if ctx.scale < 1:  # before or after: where there are fewer numbers
            return ctx.back(gradient * ctx.scale), None, None, None
        return ctx.back(gradient).mul_(ctx.scale), None, None, None


def _moved(x: Tensor, there: Move, back: Move, scale: float) -> Tensor:
    moved: Tensor = _Moved.apply(x, there, back, scale)  # type: ignore[no-untyped-call]
    return moved
