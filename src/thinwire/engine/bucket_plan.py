"""Which parameters travel together, and in which order."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor
from torch.nn import Parameter

from thinwire.engine.buckets import ParameterBucket, TrainingContext, local


@dataclass(frozen=True, slots=True)
class Item:
    """What bucket planning needs to know of one parameter."""

    num_bytes: int
    kind: Hashable
    """Only parameters of one kind (dtype and device) share a bucket."""


def plan(items: Sequence[Item], bucket_bytes: int, end_bytes: int = 0) -> list[list[int]]:
    """Cut parameters into buckets, last parameter first, as backward fills them.

    A bucket is closed when it has reached `bucket_bytes`, so only one larger parameter can make it much
    larger. With `end_bytes`, the first bucket is closed at that size, so that sending starts early, and so
    many bytes are kept for the last one, which nothing of backward is left to hide; what is left over before
    it joins the bucket before if it is less than half of one.

    >>> plan([Item(4, "cpu")] * 3, bucket_bytes=8)
    [[2, 1], [0]]
    >>> plan([Item(4, "cpu")] * 8, bucket_bytes=12, end_bytes=4)
    [[7], [6, 5, 4], [3, 2, 1], [0]]
    """
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    before = [0, *accumulate(item.num_bytes for item in items)]

    def size(bucket: list[int]) -> int:
        return sum(items[i].num_bytes for i in bucket)

    for index in reversed(range(len(items))):
        kind = items[index].kind
        if before[index] < end_bytes <= before[index + 1]:  # here the last bucket begins
            for other, bucket in filling.items():
                full = [b for b in closed if items[b[0]].kind == other and size(b) >= bucket_bytes]
                if full and 2 * size(bucket) < bucket_bytes:
                    full[-1].extend(bucket)
                else:
                    closed.append(bucket)
            filling = {}
        bucket = filling.setdefault(kind, [])
        bucket.append(index)
        limit = bucket_bytes if closed or not end_bytes else min(bucket_bytes, end_bytes)
        if size(bucket) >= limit:
            closed.append(filling.pop(kind))
    return closed + list(filling.values())


def small_numel(parameters: Iterable[Tensor]) -> int:
    """Parameters with at most this many numbers count as small: the square root of a model's numbers, so
    biases and norms of n x n layers do, and all of them together cost little to send."""
    return math.isqrt(sum(p.numel() for p in parameters))


def make_buckets(
    named: Sequence[tuple[str, Parameter]],
    bucket_bytes: int,
    end_bytes: int = 0,
    *,
    context: TrainingContext | None = None,
) -> list[ParameterBucket]:
    """The buckets of trainable parameters that the same workers hold, in the order they go out."""
    parts = [local(p) for _, p in named]
    items = [Item(p.nbytes, (p.dtype, p.device)) for p in parts]
    small = small_numel(parts)
    context = context or TrainingContext()
    return [
        ParameterBucket(place, [named[i][0] for i in members], [named[i][1] for i in members], small, context)
        for place, members in enumerate(plan(items, bucket_bytes, end_bytes))
    ]
