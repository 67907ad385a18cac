"""What a message of one bucket looks like: sparse entries, then what travels as it is; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compress.layout import SparseLayout, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The same on all workers. The tail (small tensors, bookkeeping) rides along, which saves a round."""

    layout: SparseLayout
    tail: int
    """Numbers after the entries, as wide as the residual's: small tensors and bookkeeping, and"""
    held: int = 0
    """after these what residuals hold at so many indices at most, which were kept in the step before."""

    @property
    def num_words(self) -> int:
        """The message is an int32 tensor of this many words, an even number."""
        words = (self.tail + self.held) * self.layout.itemsize // 4
        return self.layout.num_words + words + words % 2

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_words


def form_of(room: int, tail: int, held: int, itemsize: int, values: Values) -> Form:
    """Of a bucket whose gradients have `itemsize` bytes each; half-precision ones are kept in float32."""
    layout = SparseLayout(capacity=room, values=values, itemsize=max(4, itemsize))
    return Form(layout=layout, tail=tail, held=held)
