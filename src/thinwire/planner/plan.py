"""A whole plan: predictions for all strategies and numbers of workers, a recommendation, the balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.planner.cluster import Cluster
from thinwire.planner.predict import CANDIDATES, CEILING, Planner, Prediction
from thinwire.planner.recommend import BUDGET, Balance, Recommendation, balances, best_of, recommend
from thinwire.planner.workload import Workload
from thinwire.strategies import registry


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a training on a cluster would gain."""

    workload: Workload
    cluster: Cluster
    budget: float
    """Points of accuracy that may be lost."""
    predictions: tuple[Prediction, ...]
    recommendation: Recommendation
    balances: tuple[Balance, ...]
    """By number of workers: the least batch with which exact SGD hides its communication."""

    @property
    def counts(self) -> list[int]:
        return sorted({p.workers for p in self.predictions})

    def with_workers(self, workers: int) -> list[Prediction]:
        """The predictions for so many workers, the fastest first."""
        return sorted((p for p in self.predictions if p.workers == workers), key=lambda p: p.step_s)

    def best(self, workers: int) -> Prediction | None:
        """The recommended strategy for so many workers."""
        return best_of([p for p in self.with_workers(workers) if p.strategy != CEILING], self.budget)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; shapes are summed up."""
        workload = asdict(self.workload)
        del workload["shapes"], workload["shares"]
        workload |= {"num_params": self.workload.num_params, "compute_s": self.workload.compute_s}
        return {
            "workload": workload,
            "cluster": asdict(self.cluster),
            "accuracy_budget": self.budget,
            "recommendation": self.recommendation.as_dict(),
            "balance": [asdict(each) for each in self.balances],
            "predictions": [p.as_dict() for p in self.predictions],
        }


def make_plan(
    workload: Workload,
    cluster: Cluster,
    counts: Sequence[int],
    *,
    strategies: Sequence[str] | None = None,
    budget: float = BUDGET,
    told: Callable[[str], object] = lambda words: None,
) -> Plan:
    """Predict all strategies (the usual ones, or those asked for) with all numbers of workers."""
    planner = Planner(workload, cluster)
    asked = list(dict.fromkeys([CEILING, *(CANDIDATES if strategies is None else strategies)]))
    for text in asked:  # all settings are checked before the first is played
        registry.from_text(text)
    predictions = tuple(planner.predictions(asked, counts, told))
    return Plan(
        workload=workload,
        cluster=cluster,
        budget=budget,
        predictions=predictions,
        recommendation=recommend(predictions, workload, budget=budget),
        balances=balances(planner, [workers for workers in counts if workers > 1]),
    )
