"""What the messages of every step look like, known beforehand; from sizes alone, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from thinwire.compress.layout import Values
from thinwire.strategies.sparse.form import Form, form_of
from thinwire.strategies.sparse.gauge import PROBES
from thinwire.strategies.sparse.rooms import FALL, FIRST_DENSITY, density_at, divide_room, total_room
from thinwire.traffic import Round, Sizes, total


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Of one strategy for one model and number of workers. Lists are in the order of buckets; where a form
    is None, that bucket goes dense."""

    sizes: Sizes
    world_size: int
    density: float
    warmup_steps: int
    payload: Values
    quantum: int
    """Room is divided in multiples of this."""
    completes: bool
    """Whether what residuals hold at indices that were applied goes with the next step's messages."""
    sparse_rounds: Callable[[Form, int], Iterable[Round]]
    """The wire operations for one message, with so many workers."""

    @property
    def numels(self) -> list[int]:
        """How many numbers of each bucket need not arrive exact."""
        exact = self.sizes.exact or (0,) * len(self.sizes.buckets)
        return [numel - part for (numel, _), part in zip(self.sizes.buckets, exact, strict=True)]

    @property
    def even(self) -> list[float]:
        """Weights that give each bucket room by its size."""
        return [float(numel) for numel in self.numels]

    def density_at(self, step: int) -> float:
        return density_at(step, self.density, self.warmup_steps)

    def forms(self, step: int, weights: Sequence[float], held: Sequence[int]) -> list[Form | None]:
        """Of the messages of a step; `held`: of how many indices of each bucket they also carry what
        residuals hold."""
        since = step - self.warmup_steps
        if since in PROBES or since + 1 in PROBES:  # what the other buckets then send is to be known, too
            weights = self.even
        numels, density = self.numels, self.density_at(step)
        rooms = divide_room(numels, weights, total_room(numels, density, self.quantum), self.quantum)
        forms = self._of(rooms, held)
        if step < self.warmup_steps and not self._pays(rooms, density):
            return [None] * len(forms)
        if since in PROBES:
            forms[numels.index(max(numels))] = None
        return forms

    def _of(self, rooms: Sequence[int], held: Sequence[int]) -> list[Form | None]:
        return [
            form_of(room, all_of_it - numel, kept, itemsize, self.payload) if room else None
            for room, numel, kept, (all_of_it, itemsize) in zip(
                rooms, self.numels, held, self.sizes.buckets, strict=True
            )
        ]

    def _pays(self, rooms: Sequence[int], density: float) -> bool:
        """Half the bytes are not worth selecting and merging so many numbers."""
        held = [room if self.completes else 0 for room in rooms]
        sparse, dense = (
            total(self._rounds(forms), rank=0, world_size=self.world_size).sent_bytes
            for forms in (self._of(rooms, held), [None] * len(rooms))
        )
        return density < FIRST_DENSITY and 2 * sparse < dense

    @property
    def most_kept(self) -> int:
        """Of how many indices at most what residuals hold is sent a step later."""
        sparse = max(self.density, FIRST_DENSITY / FALL) if self.warmup_steps else self.density
        return total_room(self.numels, sparse, self.quantum) if self.completes else 0

    def rooms_to_keep(self, forms: Sequence[Form | None]) -> list[int]:
        """How many indices of each bucket are to be remembered of a step with these messages."""
        return [form.layout.capacity if form and self.completes else 0 for form in forms]

    def rounds(self, step: int) -> Iterable[Round]:
        """The wire operations of a step, where buckets have room by their size."""
        nothing = [0] * len(self.numels)
        held = self.rooms_to_keep(self.forms(step - 1, self.even, nothing)) if step else nothing
        return self._rounds(self.forms(step, self.even, held))

    def _rounds(self, forms: Sequence[Form | None]) -> Iterable[Round]:
        for form, num_bytes in zip(forms, self.sizes.bucket_bytes(), strict=True):
            if form is None:
                yield Round(op="all_reduce", send_bytes=num_bytes)
            else:
                yield from self.sparse_rounds(form, self.world_size)
