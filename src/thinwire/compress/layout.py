"""How a sparse message looks on the wire, from sizes alone; no torch.

A message is int32 words: a header of two, the indices, the values; each part begins at a multiple of 8 bytes.
It always has room for the same number of entries and says in its first word how many there are, so that
workers need not tell each other sizes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.errors import check, check_one_of

Values = Literal["fp32", "bf16"]
"""What a value looks like. "fp32" leaves it as it is, also in a float64 model."""

COUNT = 0
"""The word that says how many entries are in the message, or NOT_FINITE."""
PASSED = 1
"""The word that says how many were above the threshold; those without room stayed in the residual."""
HEADER_WORDS = 2
NOT_FINITE = -1
"""A count that says: a NaN or an infinity was met, there are no entries."""

LARGEST_INDEX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLayout:
    """Where things lie in a sparse message; the same at both ends.

    >>> SparseLayout(capacity=1000).num_bytes, SparseLayout(capacity=1000, values="bf16").num_bytes
    (8008, 6008)
    """

    capacity: int
    """Entries a message has room for."""
    values: Values = "fp32"
    itemsize: int = 4
    """Bytes of a number in the residual."""

    def __post_init__(self) -> None:
        check(self.capacity >= 1, "capacity", "at least 1", self.capacity)
        check_one_of("values", self.values, ("fp32", "bf16"))
        check_one_of("itemsize", self.itemsize, (4, 8))

    @property
    def values_at(self) -> int:
        """The word at which values begin."""
        return _even(HEADER_WORDS + self.capacity)

    @property
    def num_words(self) -> int:
        value_bytes = self.capacity * (self.itemsize if self.values == "fp32" else 2)
        return _even(self.values_at + -(-value_bytes // 4))

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_words


def _even(num_words: int) -> int:
    return num_words + num_words % 2
