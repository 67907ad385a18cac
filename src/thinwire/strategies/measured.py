"""Losses of accuracy by strategy: trainings that were measured against exact SGD; no torch.

The table `accuracy.json` holds trainings on the virtual clock (which trains for real) with the loss against
exact SGD under the same recipe, workers, epochs and seeds. `python -m benchmarks.accuracy_table` makes it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("accuracy.json")
RESOLVED = 0.5
"""Rows with a larger standard error, in points, show mostly chance, unless the loss is larger still."""
FAR = 2.0
"""Standard errors from which a loss is more than chance."""
LEAST_STEPS = 1000
"""A shorter training says nothing about others: its workers have no time to come together again."""

Settings = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One strategy in one setting, against exact SGD."""

    recipe: str
    metric: str
    workers: int
    epochs: int
    steps: int
    """Optimizer steps of the whole training."""
    strategy: str
    """Its name, as in the registry."""
    settings: Settings
    """All of its settings, without those of the lead-in."""
    loss: float
    """Points of accuracy, or percent of perplexity, below exact SGD; negative if it was better."""
    error: float
    """Standard error of that difference."""
    seeds: int
    source: str
    normalised: bool = False
    """Whether its optimizer was one that makes steps of one size, such as AdamW."""

    @property
    def is_resolved(self) -> bool:
        """Whether it was long enough and shows more than chance; else it counts for its own recipe only."""
        clear = self.error <= RESOLVED or self.loss > FAR * self.error
        return clear and self.steps >= LEAST_STEPS

    def __str__(self) -> str:
        unit = "points of accuracy" if self.metric == "accuracy" else f"% of {self.metric}"
        return f"{self.loss:.1f} {unit} with {self.workers} workers ({self.recipe}, {self.steps:,} steps)"


def worst(strategy: str) -> list[Measured]:
    """For each metric, the row of a strategy that lost most, whatever its settings.

    >>> [row.metric for row in worst("diloco")]
    ['accuracy', 'perplexity']
    """
    rows = [row for row in table() if row.strategy == strategy and row.is_resolved]
    by_metric = {
        metric: [row for row in rows if row.metric == metric] for metric in ("accuracy", "perplexity")
    }
    return [max(found, key=lambda row: row.loss) for found in by_metric.values() if found]


def costs(strategy: str, workers: int, *, short: bool = False, **settings: object) -> Measured | None:
    """The row that lost most of those with these settings and the nearest number of workers, as points.
    With `short`, also of short trainings, if they clearly lost something.

    >>> costs("gossip-grad", 16, share=0.1).workers
    16
    >>> costs("gossip-grad", 16, share=0.123)
    """
    rows = [
        row
        for row in table()
        if row.strategy == strategy
        and row.metric == "accuracy"
        and (row.is_resolved or (short and row.loss > FAR * row.error))
        and settings.items() <= row.settings.items()
    ]
    nearest = min((abs(row.workers - workers) for row in rows), default=0)
    found = [row for row in rows if abs(row.workers - workers) == nearest]
    return max(found, key=lambda row: row.loss, default=None)


@functools.cache
def table() -> tuple[Measured, ...]:
    """The rows that come with this version."""
    return tuple(Measured(**row) for row in json.loads(TABLE.read_text(encoding="utf-8"))["rows"])
