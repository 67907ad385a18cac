"""What settings of Trickle cost in accuracy, as far as it was measured."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

from thinwire.compress.codec import Codec, codec_of
from thinwire.compress.payload import ChangePayload
from thinwire.strategies.local.reduction import encoded_bytes
from thinwire.strategies.measured import Measured, table

MANY = 2**20
"""Numbers for which a share of bytes is counted."""
_DEFAULTS: dict[str, object] = {"fragments": None, "momentum": "auto", "delay": 1}


class TrickleSetting(NamedTuple):
    """One measured setting."""

    interval: int
    payload: ChangePayload | None
    density: float
    workers: int
    points: float
    """Accuracy lost, in points."""
    where: str
    """Recipe and length of the training."""

    def __str__(self) -> str:
        look = "" if self.payload is None else f", payload={self.payload!r}"
        return f"Trickle(interval={self.interval}, density={self.density:g}{look})"

    @property
    def codec(self) -> Codec:
        return codec_of(self.payload, self.density)

    @property
    def bytes_share(self) -> float:
        """Bytes against a dense all-reduce in every step, of the large parameters."""
        dense = 2 * (self.workers - 1) / self.workers * MANY * 4
        return encoded_bytes(MANY, 4, self.codec, self.workers) / dense / self.interval


@functools.cache
def known() -> tuple[TrickleSetting, ...]:
    """The settings with the default momentum and delay that were measured well enough to tell them apart."""
    rows = [
        row for row in table() if row.strategy == "trickle" and row.metric == "accuracy" and row.is_resolved
    ]
    return tuple(_expected(row) for row in rows if _DEFAULTS.items() <= row.settings.items())


def _expected(row: Measured) -> TrickleSetting:
    names = ("interval", "payload", "density")
    interval, payload, density = (cast("Any", row.settings[name]) for name in names)
    return TrickleSetting(
        interval, payload, density, row.workers, row.loss, f"{row.recipe}, {row.epochs} epochs"
    )


def options(world_size: int) -> list[TrickleSetting]:
    """The settings measured with the number of workers that is nearest, the most accurate first; of equally
    accurate ones, that with fewer bytes.

    >>> [(row.interval, row.density, row.workers) for row in options(3)]
    [(8, 0.03, 4)]
    """
    nearest = min({row.workers for row in known()}, key=lambda workers: abs(workers - world_size))
    rows = [row for row in known() if row.workers == nearest]
    return sorted(rows, key=lambda row: (row.points, row.bytes_share))
