"""What the runs of the map say: for every strategy, workers and rate, what it costs and what it saves."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.map_run import RATES, MapRun

EXACT = "all-reduce"
SHARES = (0.9, 0.99)
"""Targets are what exact SGD has reached after these shares of its training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MapPoint:
    """One strategy with so many workers at one rate; means over seeds."""

    strategy: str
    workers: int
    rate: str
    lost: float
    """Against exact SGD at the end: points of accuracy, or percent of perplexity."""
    to_target_s: tuple[float | None, ...]
    """Seconds to each target; None where it is not reached."""
    train_s: float
    sent_share: float
    """Bytes per step and worker over those of a dense all-reduce."""
    seeds: int


def read_runs(folder: Path = RESULTS) -> dict[str, list[MapRun]]:
    """All runs by recipe."""
    files = sorted(folder.glob("map-*.json"))
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {content["recipe"]: [MapRun(**run) for run in content["runs"]] for content in contents}


def points_of(runs: Sequence[MapRun]) -> list[MapPoint]:
    """Points of one recipe; strategies of which a rate is missing have fewer."""
    found = []
    for workers in sorted({run.workers for run in runs}):
        here = [run for run in runs if run.workers == workers and run.value is not None]
        exact = [run for run in here if run.strategy == EXACT]
        if not exact:
            continue
        for strategy in dict.fromkeys(run.strategy for run in here):
            for rate in RATES:
                own = [run for run in here if run.strategy == strategy and rate in run.seconds]
                if own:
                    found.append(_point(own, exact, rate))
    return found


def _point(own: Sequence[MapRun], exact: Sequence[MapRun], rate: str) -> MapPoint:
    first = own[0]
    seeds = {run.seed for run in own}
    reference = [run for run in exact if run.seed in seeds] or exact  # single runs differ by more than means
    value, best = (statistics.mean(run.value or 0.0 for run in runs) for runs in (own, reference))
    better_is_more = first.metric == "accuracy"
    # where evaluations are noisy, the later one may be the lower one
    targets = accumulate((_at_share(reference, share) for share in SHARES), max if better_is_more else min)
    dense_bytes = 8 * first.num_parameters * (first.workers - 1) / first.workers
    return MapPoint(
        strategy=first.strategy,
        workers=first.workers,
        rate=rate,
        lost=100 * (best - value) if better_is_more else 100 * (value / best - 1),
        to_target_s=tuple(_mean_time(own, rate, target) for target in targets),
        train_s=statistics.mean(run.seconds[rate][-1] for run in own),
        sent_share=statistics.mean(run.sent_bytes_per_step for run in own) / dense_bytes,
        seeds=len(own),
    )


def _at_share(runs: Sequence[MapRun], share: float) -> float:
    """What runs have, on average, after a share of their epochs."""
    places = [max(0, round(share * run.epochs) - 1) for run in runs]
    return statistics.mean(run.values[place] or 0.0 for run, place in zip(runs, places, strict=True))


def _mean_time(runs: Sequence[MapRun], rate: str, target: float) -> float | None:
    """When the mean of runs with several seeds first reaches the target: one low seed does not decide."""
    ends_s = [statistics.mean(each) for each in zip(*(run.seconds[rate] for run in runs), strict=True)]
    means = [
        statistics.mean(values)
        for each in zip(*(run.values for run in runs), strict=True)
        if len(values := [value for value in each if value is not None]) == len(runs)
    ]
    if len(means) < len(ends_s):
        return None  # some run failed on its way
    return time_to(ends_s, means, target, 1.0 if runs[0].metric == "accuracy" else -1.0)


def time_to(ends_s: Sequence[float], values: Sequence[float], target: float, sign: float) -> float | None:
    """When values, measured at these times, first reach the target, by a straight line between two of them;
    `sign` is 1 where more is better, else -1."""
    before_s, before = 0.0, None
    for end_s, value in zip(ends_s, values, strict=True):
        if sign * value >= sign * target:
            if before is None:
                return end_s
            return before_s + (end_s - before_s) * (target - before) / (value - before)
        if before is None or sign * value > sign * before:
            before = value
        before_s = end_s
    return None


def frontier(points: Sequence[MapPoint]) -> list[MapPoint]:
    """Of points that reach the first target, those to which none is better in both, the quickest first."""
    reached = sorted(
        (p for p in points if p.to_target_s[0] is not None), key=lambda p: (p.to_target_s[0], p.lost)
    )
    best = list[MapPoint]()
    for point in reached:
        if not best or point.lost < best[-1].lost:
            best.append(point)
    return best
