"""The formats of the messages of every step, known beforehand from sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thinwire.compress.sparse import Values
from thinwire.strategies.parts.density import (
    FALL,
    FIRST_DENSITY,
    density_at,
    divide_capacity,
    total_capacity,
)
from thinwire.strategies.sparse.cost_probe import PROBES
from thinwire.strategies.sparse.format import MessageFormat, format_of


@dataclass(frozen=True, slots=True)
class BucketSize:
    """What a plan needs to know of a bucket."""

    numel: int
    """Its gradients, with the bookkeeping that travels along."""
    itemsize: int
    exact: int
    """How many of them must arrive exact."""

    @property
    def lossy(self) -> int:
        return self.numel - self.exact


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePlan:
    """One strategy's messages for one model and number of workers. Lists are in the order of buckets; where a
    format is None, that bucket goes dense."""

    sizes: Sequence[BucketSize]
    world_size: int
    density: float
    warmup_steps: int
    payload: Values
    quantum: int
    """Capacity is divided in multiples of this."""
    completes: bool
    """Whether leftover residuals at applied indices go with the next step's messages."""
    sent_bytes: Callable[[MessageFormat, int], int]
    """Bytes that one of so many workers sends for one message."""

    @property
    def numels(self) -> list[int]:
        """How many numbers of each bucket need not arrive exact."""
        return [size.lossy for size in self.sizes]

    @property
    def even(self) -> list[float]:
        """Weights that give each bucket capacity by its size."""
        return [float(numel) for numel in self.numels]

    def density_at(self, step: int) -> float:
        return density_at(step, self.density, self.warmup_steps)

    def formats(self, step: int, weights: Sequence[float], held: Sequence[int]) -> list[MessageFormat | None]:
        """The formats of a step, counted from 0; `held`: for how many indices of each bucket messages also
        carry leftover residuals."""
        since = step - self.warmup_steps
        if since in PROBES or since + 1 in PROBES:  # so that what the other buckets then send is known
            weights = self.even
        numels, density = self.numels, self.density_at(step)
        capacity = total_capacity(numels, density, self.quantum)
        capacities = divide_capacity(numels, weights, capacity, self.quantum)
        formats = self._formats(capacities, held)
        if step < self.warmup_steps and not self._pays(capacities, density):
            return [None] * len(formats)
        if since in PROBES:
            formats[numels.index(max(numels))] = None
        return formats

    def _formats(self, capacities: Sequence[int], held: Sequence[int]) -> list[MessageFormat | None]:
        return [
            format_of(capacity, size.exact, kept, size.itemsize, self.payload) if capacity else None
            for capacity, size, kept in zip(capacities, self.sizes, held, strict=True)
        ]

    def _pays(self, capacities: Sequence[int], density: float) -> bool:
        """Half the bytes are not worth selecting and merging so many numbers."""
        held = [capacity if self.completes else 0 for capacity in capacities]
        dense = [self._dense_bytes(size) for size in self.sizes]
        sparse = [
            whole if each is None else self.sent_bytes(each, self.world_size)
            for each, whole in zip(self._formats(capacities, held), dense, strict=True)
        ]
        return density < FIRST_DENSITY and 2 * sum(sparse) < sum(dense)

    def _dense_bytes(self, size: BucketSize) -> int:
        return 2 * (size.numel * size.itemsize * (self.world_size - 1) // self.world_size)

    @property
    def most_kept(self) -> int:
        """For how many indices at most leftover residuals are sent a step later."""
        sparse = max(self.density, FIRST_DENSITY / FALL) if self.warmup_steps else self.density
        return total_capacity(self.numels, sparse, self.quantum) if self.completes else 0

    def kept_capacities(self, formats: Sequence[MessageFormat | None]) -> list[int]:
        """How many indices of each bucket are to be remembered of a step with these messages."""
        return [each.layout.capacity if each and self.completes else 0 for each in formats]
