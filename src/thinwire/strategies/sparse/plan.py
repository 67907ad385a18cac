"""The formats of the messages of every step, known beforehand from sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinwire.compress.sparse import SparseLayout
from thinwire.strategies.base import Bucket
from thinwire.strategies.parts import FALL, FIRST_DENSITY, density_at, divide_capacity, total_capacity
from thinwire.strategies.sparse.cost_probe import PROBES

if TYPE_CHECKING:
    from thinwire.strategies.sparse.base import SparseStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """One bucket's message: sparse entries, then numbers as they are, which saves a round."""

    layout: SparseLayout
    tail: int
    """Numbers after the entries, as wide as the residual's: small tensors and bookkeeping."""
    held: int = 0
    """Numbers after the tail: leftover residuals at indices that were applied in the step before."""

    @property
    def num_words(self) -> int:
        """The message is an int32 tensor of this many words, an even number."""
        words = (self.tail + self.held) * self.layout.itemsize // 4
        return self.layout.num_words + words + words % 2

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_words


class MessagePlan:
    """One strategy's messages for one model and number of workers. Lists are in the order of buckets; where a
    format is None, that bucket goes dense."""

    def __init__(self, strategy: SparseStrategy, buckets: Sequence[Bucket], world_size: int) -> None:
        self._strategy = strategy
        self._buckets = buckets
        self._world_size = world_size
        self._quantum = strategy.quantum(world_size)
        self.numels = [bucket.exact_from for bucket in buckets]
        """How many numbers of each bucket need not arrive exact."""

    @property
    def even(self) -> list[float]:
        """Weights that give each bucket capacity by its size."""
        return [float(numel) for numel in self.numels]

    def density_at(self, step: int) -> float:
        return density_at(step, self._strategy.density, self._strategy.warmup_steps)

    def formats(self, step: int, weights: Sequence[float], held: Sequence[int]) -> list[MessageFormat | None]:
        """The formats of a step, counted from 0; `held`: leftover residuals that messages also carry."""
        since = step - self._strategy.warmup_steps
        if since in PROBES or since + 1 in PROBES:  # so that what the other buckets then send is known
            weights = self.even
        density = self.density_at(step)
        capacity = total_capacity(self.numels, density, self._quantum)
        capacities = divide_capacity(self.numels, weights, capacity, self._quantum)
        formats = self._formats(capacities, held)
        if since < 0 and not self._pays(capacities, density):
            return [None] * len(formats)
        if since in PROBES:
            formats[self.numels.index(max(self.numels))] = None
        return formats

    def _formats(self, capacities: Sequence[int], held: Sequence[int]) -> list[MessageFormat | None]:
        return [
            self._format(bucket, capacity, kept) if capacity else None
            for bucket, capacity, kept in zip(self._buckets, capacities, held, strict=True)
        ]

    def _format(self, bucket: Bucket, capacity: int, held: int) -> MessageFormat:
        itemsize = max(4, bucket.gradient.element_size())  # half-precision gradients are kept in float32
        layout = SparseLayout(capacity=capacity, values=self._strategy.payload, itemsize=itemsize)
        return MessageFormat(layout=layout, tail=bucket.gradient.numel() - bucket.exact_from, held=held)

    def _pays(self, capacities: Sequence[int], density: float) -> bool:
        """Half the bytes are not worth selecting and merging so many numbers."""
        held = [capacity if self._strategy.completes else 0 for capacity in capacities]
        others = self._world_size - 1
        dense = [2 * (bucket.gradient.nbytes * others // self._world_size) for bucket in self._buckets]
        sparse = [
            whole if each is None else self._strategy.sent_bytes(each, self._world_size)
            for each, whole in zip(self._formats(capacities, held), dense, strict=True)
        ]
        return density < FIRST_DENSITY and 2 * sum(sparse) < sum(dense)

    @property
    def most_kept(self) -> int:
        """For how many indices at most leftover residuals are sent a step later."""
        if not self._strategy.completes:
            return 0
        density, warms_up = self._strategy.density, self._strategy.warmup_steps > 0
        sparse = max(density, FIRST_DENSITY / FALL) if warms_up else density
        return total_capacity(self.numels, sparse, self._quantum)
