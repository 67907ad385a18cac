"""What settings of Trickle cost in accuracy, as far as it was measured. The one place that has these numbers.

Each row is a whole training compared with exact SGD: same model, epochs, schedule, batch and seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from thinwire.compress.codec import CHUNK


class Expected(NamedTuple):
    """One measured setting."""

    interval: int
    density: float
    workers: int
    points: float
    """Accuracy lost, in points."""
    where: str
    """Recipe and length of the training."""

    @property
    def bytes_share(self) -> float:
        """Bytes against a dense all-reduce in every step: a number sent takes two bytes of four, a chunk's
        scale two more; all numbers at one byte each from a density of 0.4 on."""
        per_number = 1.0 if self.density > 0.4 else 2 * self.density + 2 / CHUNK
        return per_number / 4 / self.interval


_HALF = "cifar-resnet20, 15 epochs"
_FULL = "cifar-resnet20, 30 epochs"
MEASURED: Sequence[Expected] = (
    Expected(4, 0.06, 4, 0.6, _HALF),
    Expected(8, 0.06, 4, 0.6, _HALF),
    Expected(8, 0.03, 4, 0.9, _HALF),
    Expected(32, 0.03, 4, 1.8, _FULL),
    Expected(8, 0.03, 16, 1.1, _FULL),
    Expected(8, 0.01, 16, 1.3, _FULL),
    Expected(16, 0.03, 16, 1.8, _FULL),
)


def options(world_size: int) -> list[Expected]:
    """The settings measured with the number of workers that is nearest, the most accurate first; of equally
    accurate ones, that with fewer bytes.

    >>> [(row.interval, row.density) for row in options(3)]
    [(8, 0.06), (4, 0.06), (8, 0.03), (32, 0.03)]
    """
    nearest = min({row.workers for row in MEASURED}, key=lambda workers: abs(workers - world_size))
    rows = [row for row in MEASURED if row.workers == nearest]
    return sorted(rows, key=lambda row: (row.points, row.bytes_share))
