"""A whole plan: predictions for all strategies and numbers of workers, a recommendation, the balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thinwire.planner.beside import Beside
from thinwire.planner.cluster import Cluster
from thinwire.planner.link_work import LinkWorks, measure_links
from thinwire.planner.predict import CANDIDATES, CEILING, Planner, Prediction, parts, settled
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


def asked(strategies: Sequence[str] | None) -> list[str]:
    """Those asked for, or the usual ones, and the ceiling before them."""
    return list(dict.fromkeys([CEILING, *(CANDIDATES if strategies is None else strategies)]))


def links_of(workload: Workload, strategies: Sequence[str] | None = None) -> LinkWorks:
    """Measure what the links of strategies take from the processor that the workload computes on; nothing
    where it computes elsewhere."""
    if not workload.on_processor:
        return {}
    played = [settled(registry.from_text(text)) for text in asked(strategies) if text != CEILING]
    return measure_links(workload.shapes, played)


def make_plan(
    workload: Workload,
    cluster: Cluster,
    counts: Sequence[int],
    *,
    strategies: Sequence[str] | None = None,
    budget: float = BUDGET,
    told: Callable[[str], object] = lambda words: None,
    links: LinkWorks | None = None,
    beside: Beside | None = None,
) -> Plan:
    """Predict all strategies (the usual ones, or those asked for) with all numbers of workers.

    `links`: what links take from the processor that the workload computes on; `beside`: a second process that
    was started for the same plan.
    """
    planner, texts = Planner(workload, cluster, links), asked(strategies)
    pairs = planner.pairs(texts, counts)  # all settings are checked before the first is played
    planner.play_all(pairs if beside is None else parts(pairs)[0])
    found = balances(planner, [workers for workers in counts if workers > 1])
    planner.plays |= {} if beside is None else beside.plays()
    predictions = tuple(planner.predictions(texts, counts, told))
    return Plan(
        workload=workload,
        cluster=cluster,
        budget=budget,
        predictions=predictions,
        recommendation=recommend(predictions, workload, budget=budget),
        balances=found,
    )
