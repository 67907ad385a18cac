"""The loss of accuracy to expect of a strategy, from the trainings that were measured; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.strategies.measured import Measured, Settings, table

LEAD_IN = ("warmup_steps", "exact_steps", "keep_rate", "clip_norm")
"""Settings for how a training begins or how rates change: they are no other strategy."""
FURTHEST = 2
"""A row counts for up to so many times its workers; what was lost counts as many times then."""
SENT = ("share", "density")
"""Settings for how much is sent: a strategy that sends more loses no more."""
SHORTEST = 10
"""A row counts for trainings of at least this part of its steps: a shorter one loses more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The expected loss of a strategy with some number of workers."""

    loss: float
    low: float
    high: float
    """Upper bound, two standard errors above the loss; `low` is as far below it."""
    basis: str
    """The trainings it was measured on, in words."""

    def text(self) -> str:
        """As a table shows it.

        >>> Expected(loss=0.0, low=0.0, high=0.0, basis="exact").text()
        'exact'
        """
        if self.low == self.high == 0:
            return "exact"
        return f"{self.loss:.1f} ({self.low:+.1f} to {self.high:+.1f})"


EXACT = Expected(loss=0.0, low=0.0, high=0.0, basis="exact: the same steps as one worker with all samples")


def without_lead_in(settings: Settings) -> dict[str, object]:
    """The settings that make a strategy what it is after its first steps."""
    return {name: value for name, value in settings.items() if name not in LEAD_IN}


def expected(
    strategy: str,
    settings: Settings,
    workers: int,
    *,
    recipe: str | None = None,
    num_steps: int | None = None,
    normalised: bool = False,
    rows: Sequence[Measured] | None = None,
) -> Expected | None:
    """The loss to expect; None where nobody has measured it with about as many workers.

    `settings` are all of the strategy's, defaults included. Where the recipe itself was measured, its row
    counts; else the worst of all that are judged by accuracy, since nobody knows which the model is like.
    A training of `num_steps` (None: not known) is not judged by much longer ones.
    With an optimizer such as AdamW (`normalised`), only what was trained with one counts, and a percent of
    perplexity as a point: there the same strategies have lost far more. A recipe that was trained only with
    more being sent counts with that: its loss is the least to expect.
    """
    if strategy == "all-reduce" or workers == 1:
        return EXACT
    own = without_lead_in(settings)
    known = table() if rows is None else rows
    rows = [row for row in known if row.strategy == strategy]
    rows = [row for row in rows if num_steps is None or SHORTEST * num_steps >= row.steps]
    found = [row for row in rows if _same(row.settings, own)]
    same = [row for row in found if row.recipe == recipe]
    found = same or [row for row in found if row.is_resolved and _is_like(row, normalised)]
    candidates = _nearest_of_each(found, workers)
    if not candidates:
        return None
    if not same:
        rest = [row for row in rows if row.is_resolved and _is_like(row, normalised)]
        rest = [row for row in rest if row.recipe not in _recipes(found) and _sends_more(row.settings, own)]
        candidates += _nearest_of_each(rest, workers)
    worst = max(candidates, key=lambda row: _loss(row, workers))
    loss = _loss(worst, workers)
    runs = "1 run" if worst.seeds == 1 else f"{worst.seeds} runs"
    trained = f"{worst.epochs} epochs of {worst.steps // worst.epochs:,} steps"
    sent = [
        f"{name}={worst.settings[name]:g}, " for name in SENT if worst.settings.get(name) != own.get(name)
    ]
    basis = f"{worst.recipe} with {worst.workers} workers, {''.join(sent)}{trained}, {runs} ({worst.source})"
    margin = 2 * worst.error
    return Expected(loss=loss, low=loss - margin, high=loss + margin, basis=basis)


def _loss(row: Measured, workers: int) -> float:
    """The loss with so many workers: it grows with them, in the measured cases at most in proportion."""
    return row.loss * max(1.0, workers / row.workers) if row.loss > 0 else row.loss


def _same(measured: Settings, own: Settings) -> bool:
    """Whether these are the settings that were measured; one that did not exist then must be off."""
    known = all(name in own and own[name] == value for name, value in measured.items())
    return known and not any(value for name, value in own.items() if name not in measured)


def _sends_more(measured: Settings, own: Settings) -> bool:
    """Whether what was measured differs in nothing but that more was sent."""
    pairs = [(name, measured.get(name), own.get(name)) for name in SENT]
    larger: dict[str, object] = {
        name: more
        for name, more, less in pairs
        if isinstance(more, int | float) and isinstance(less, float) and more > less
    }
    return bool(larger) and _same(measured, {**own, **larger})


def _is_like(row: Measured, normalised: bool) -> bool:
    # percents of perplexity are no points of accuracy; with SGD the recipes judged by accuracy are enough
    return row.normalised if normalised else row.metric == "accuracy"


def _recipes(rows: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys(row.recipe for row in rows))


def _nearest_of_each(rows: Sequence[Measured], workers: int) -> list[Measured]:
    """One row of each recipe that was measured with about as many workers."""
    found = [_nearest([row for row in rows if row.recipe == name], workers) for name in _recipes(rows)]
    return [row for row in found if row is not None]


def _nearest(rows: Sequence[Measured], workers: int) -> Measured | None:
    """The row with the fewest workers that are enough, else with the most if that is near; of several, the
    longest training."""
    enough = [row for row in rows if FURTHEST * row.workers >= workers]
    at_least = [row for row in enough if row.workers >= workers]
    pool = at_least or enough
    if not pool:
        return None
    count = min(row.workers for row in at_least) if at_least else max(row.workers for row in enough)
    return max((row for row in pool if row.workers == count), key=lambda row: row.epochs)


def standard_error(values: Sequence[float], exact: Sequence[float], usual: float) -> float:
    """Standard error of the difference of two means; `usual`: deviation of a run where few are known."""

    def variance(runs: Sequence[float]) -> float:
        mean = sum(runs) / len(runs)
        own = math.sqrt(sum((v - mean) ** 2 for v in runs) / (len(runs) - 1)) if len(runs) > 2 else 0.0
        return max(own, usual) ** 2 / len(runs)

    return math.sqrt(variance(values) + variance(exact))
