"""The result a recipe aims at, and how long runs took to get there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.report.runs import Run


@dataclass(frozen=True, slots=True)
class Target:
    """A value of the test metric."""

    metric: str
    value: float
    lower_is_better: bool

    def seconds(self, run: Run) -> float | None:
        """Seconds of training until the metric was first as good; None if it never was."""
        return next((at_s for at_s, value in run.values() if self._reached_by(value)), None)

    def _reached_by(self, value: float) -> bool:
        return value <= self.value if self.lower_is_better else value >= self.value


def target_of(runs: Iterable[Run]) -> Target | None:
    """The target of some runs of one recipe; it is on record once one of them has finished.

    A benchmark that trains a recipe for a shorter time has a target of its own, the same for all its runs.
    Which direction is better is not on record: it is read off the summaries, each of which says whether its
    value reached the target.
    """
    finished = [run for run in runs if run.summary is not None]
    if not finished:
        return None
    summaries = [run.summary for run in finished if run.summary is not None]
    metric, target = summaries[0].metric, summaries[0].target
    apart = [(s.value, s.reached) for s in summaries if s.value is not None and s.value != target]
    lower_is_better = any((value < target) == reached for value, reached in apart)
    aim = finished[0].aim
    return Target(metric, target if aim is None else aim, lower_is_better)
