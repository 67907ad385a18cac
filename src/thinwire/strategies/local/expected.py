"""What settings of Trickle cost in accuracy, as far as it was measured."""

from __future__ import annotations

import functools
from typing import NamedTuple

from thinwire.compress.codec import codec_of
from thinwire.strategies.local.reduction import encoded_bytes
from thinwire.strategies.measured import Measured, table

MANY = 2**20
"""Numbers for which a share of bytes is counted."""
_DEFAULTS: dict[str, object] = {"fragments": None, "momentum": "auto", "delay": 1}


class TrickleSetting(NamedTuple):
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
        """Bytes against a dense all-reduce in every step, of the large parameters."""
        dense = 2 * (self.workers - 1) / self.workers * MANY * 4
        return encoded_bytes(MANY, 4, codec_of(self.density), self.workers) / dense / self.interval


@functools.cache
def known() -> tuple[TrickleSetting, ...]:
    """The settings with the default momentum and delay that were measured well enough to tell them apart."""
    rows = [
        row for row in table() if row.strategy == "trickle" and row.metric == "accuracy" and row.is_resolved
    ]
    return tuple(_expected(row) for row in rows if _DEFAULTS.items() <= row.settings.items())


def _expected(row: Measured) -> TrickleSetting:
    interval, density = row.settings["interval"], row.settings["density"]
    assert isinstance(interval, int)
    assert isinstance(density, float)
    return TrickleSetting(interval, density, row.workers, row.loss, f"{row.recipe}, {row.epochs} epochs")


def options(world_size: int) -> list[TrickleSetting]:
    """The settings measured with the number of workers that is nearest, the most accurate first; of equally
    accurate ones, that with fewer bytes.

    >>> [(row.interval, row.density, row.workers) for row in options(3)]
    [(8, 0.03, 4)]
    """
    nearest = min({row.workers for row in known()}, key=lambda workers: abs(workers - world_size))
    rows = [row for row in known() if row.workers == nearest]
    return sorted(rows, key=lambda row: (row.points, row.bytes_share))
