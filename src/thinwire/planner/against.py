"""Predictions against measured steps: how right is the planner, and does its pick win?

Reads the result of `python -m benchmarks.plan_grid`: step times of strategies in the lab, and the constants
that the doctor's measurements gave there before.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from thinwire.errors import DataError
from thinwire.lab.nets import parse_net
from thinwire.planner.cluster import Cluster, ClusterHost
from thinwire.planner.predict import CEILING, Planner
from thinwire.planner.workload import Workload

NEAR = 0.05
"""The pick counts as right within this of the best measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One strategy in one cell of the grid."""

    workers: int
    rate: str
    net: str
    strategy: str
    measured_s: float
    predicted_s: float
    processor_full: bool
    """The machine was the limit, not the network: the planner does not know that."""

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def cell(self) -> tuple[int, str, str]:
        return (self.workers, self.rate, self.net)


@dataclass(frozen=True, kw_only=True, slots=True)
class GridComparison:
    """All cells of a grid."""

    compared: tuple[Compared, ...]

    @property
    def counted(self) -> list[Compared]:
        """Those in which the network was what was measured."""
        return [each for each in self.compared if not each.processor_full]

    @property
    def median_error(self) -> float:
        return median(abs(each.error) for each in self.counted)

    @property
    def worst(self) -> Compared:
        return max(self.counted, key=lambda each: abs(each.error))

    def picks(self) -> tuple[int, int]:
        """Cells in which the strategy predicted to be fastest was, or nearly; and the cells in all."""
        cells = defaultdict[tuple[int, str, str], list[Compared]](list)
        for each in self.counted:
            if each.strategy != CEILING:
                cells[each.cell].append(each)
        several = [own for own in cells.values() if len(own) > 1]
        right = 0
        for own in several:
            pick = min(own, key=lambda each: each.predicted_s)
            right += pick.measured_s <= (1 + NEAR) * min(each.measured_s for each in own)
        return right, len(several)

    def as_dict(self) -> dict[str, Any]:
        right, cells = self.picks()
        return {
            "median_error": self.median_error,
            "worst_error": self.worst.error,
            "worst": asdict(self.worst),
            "right_picks": right,
            "cells": cells,
            "left_out": len(self.compared) - len(self.counted),
            "compared": [{**asdict(each), "error": each.error} for each in self.compared],
        }


def compare(path: Path, told: Callable[[str], object] = lambda words: None) -> GridComparison:
    """Predict every cell of a grid from its lab's constants."""
    files = sorted(path.glob("plan_grid-*.json")) if path.is_dir() else [path]
    hint = "python -m benchmarks.plan_grid measures one"
    if not files:
        raise DataError(f"{path} has no plan_grid-*.json", hint=hint)
    found = list[Compared]()
    for file in files:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            clusters = {(c["workers"], c["rate"]): _cluster(c["cluster"]) for c in content["clusters"]}
            cells: Sequence[dict[str, Any]] = content["cells"]
            told(f"{file.name}: predicting {len(cells)} cells ...")
            found += [_compare(cell, clusters[cell["workers"], cell["rate"]]) for cell in cells]
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}", hint=hint) from None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} is not the result of a grid: {error!r:.80}", hint=hint) from None
    if not any(not each.processor_full for each in found):
        raise DataError(f"{path} has no cell in which the network was the limit", hint=hint)
    return GridComparison(compared=tuple(found))


def _cluster(content: dict[str, Any]) -> Cluster:
    return Cluster(**{**content, "hosts": tuple(ClusterHost(**host) for host in content["hosts"])})


def _compare(cell: dict[str, Any], cluster: Cluster) -> Compared:
    planner = Planner(Workload.of_net(parse_net(cell["net"])), cluster)
    return Compared(
        workers=cell["workers"],
        rate=cell["rate"],
        net=cell["net"],
        strategy=cell["strategy"],
        measured_s=cell["step_s"],
        predicted_s=planner.predict(cell["strategy"], cell["workers"]).step_s,
        processor_full=cell["processor_full"],
    )
