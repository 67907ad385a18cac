"""The format of one bucket's message: sparse entries, then numbers that travel as they are; from sizes
alone."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.compress.sparse import SparseLayout, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """The same on all workers. The tail (small tensors, bookkeeping) rides along, which saves a round."""

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


def format_of(capacity: int, tail: int, held: int, itemsize: int, values: Values) -> MessageFormat:
    """The format for gradients of `itemsize` bytes each; half-precision ones are kept in float32."""
    layout = SparseLayout(capacity=capacity, values=values, itemsize=max(4, itemsize))
    return MessageFormat(layout=layout, tail=tail, held=held)
