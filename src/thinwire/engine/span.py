"""Numbers of a flat tensor: by tensor (views), and neighbouring ones wherever tensors keep them (Span)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """A flat tensor as tensors of these shapes, one after another."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class Span:
    """Some neighbouring numbers of tensors that are taken as one flat one; None instead of a tensor stands
    for numbers that are not there."""

    def __init__(
        self, tensors: Sequence[Tensor | None], numels: Sequence[int], start: int, stop: int
    ) -> None:
        self._parts: list[tuple[Tensor, slice, slice]] = []
        end = 0
        for tensor, numel in zip(tensors, numels, strict=True):
            begin, end = end, end + numel
            first, last = max(start, begin), min(stop, end)
            if tensor is not None and first < last:
                there, here = slice(first - begin, last - begin), slice(first - start, last - start)
                self._parts.append((tensor, there, here))

    def copy_to_(self, out: Tensor) -> None:
        """Overwrite `out` where there are numbers."""
        for tensor, there, here in self._parts:
            out[here] = tensor.reshape(-1)[there]

    def add_(self, data: Tensor, scale: float) -> None:
        """numbers += scale * data."""
        for tensor, there, here in self._parts:
            flat = tensor.reshape(-1)  # a copy if it does not lie in one piece
            flat[there].add_(data[here], alpha=scale)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))
