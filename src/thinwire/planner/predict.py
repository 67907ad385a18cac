"""Seconds, bytes and memory of a step for every strategy and number of workers, played on the clock.

The simulator plays one worker of each kind with sizes alone (`simulate/sizes.py`): layers as long as they
take, messages as the strategy really sends them. Nothing of a strategy is stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, cast

from thinwire.errors import SettingError
from thinwire.planner.accuracy import Expected, expected
from thinwire.planner.cluster import Cluster
from thinwire.planner.link_work import LinkWorks
from thinwire.planner.workload import Workload
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import StepTimes, step_times
from thinwire.strategies import registry
from thinwire.strategies.base import Strategy, overrides
from thinwire.strategies.gtopk import GTopK
from thinwire.strategies.sparse.base import SparseStrategy
from thinwire.wire.local import FEW

CEILING = "silent"
"""The strategy that sends nothing; no other can be faster."""
CANDIDATES = (
    "all-reduce",
    "all-reduce:overlap=forward",
    "gossip-grad",
    "gossip-grad:share=0.1",
    "stochastic-gradient-push",
    "topk",
    "gtopk",
    "oktopk",
    "sasgd",
    "diloco",
    "diloco:fragments=5:delay=5",
    "trickle",
    "partial-averaging",
    "post-local",
    "hierarchical-averaging",
    "downpour",
    "easgd",
)
Plays = dict[tuple[Strategy, int], StepTimes]
"""Steps of settled strategies by number of workers."""
MOST_ONE_BY_ONE = 16
"""Number of workers up to which each is played where workers talk to whoever listens: nobody waits there, so
more workers do not change the time of a step."""
MOST_ON_SITES = 256
"""Largest number of workers on several sites for which strategies are played whose workers are not alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """One strategy with one number of workers."""

    strategy: str
    workers: int
    step_s: float
    low_s: float
    high_s: float
    """Upper bound of `step_s`, as far as the cluster is known; `low_s` is the lower one."""
    exposed_s: float
    """Seconds of the step spent waiting for the wire."""
    sent_bytes: float
    messages: float
    """Messages per step and worker, as `sent_bytes`."""
    memory_bytes: int
    """Memory of a worker beside its model, gradients and optimizer."""
    efficiency: float
    """The speed of one machine alone over that of one of these workers."""
    speedup: float
    """Samples per second of all workers over those of one machine alone."""
    loss: Expected | None
    """Expected loss of accuracy; None: not measured."""
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def settled(strategy: Strategy) -> Strategy:
    """The strategy as it is after its lead-in: what most steps of a training are like."""
    names = {field.name for field in fields(cast("Any", strategy))}
    lead_in = {name: 0 for name in ("warmup_steps", "exact_steps") if name in names}
    return cast("Strategy", replace(cast("Any", strategy), **lead_in)) if lead_in else strategy


def parts(
    pairs: Sequence[tuple[Strategy, int]],
) -> tuple[list[tuple[Strategy, int]], list[tuple[Strategy, int]]]:
    """The parts of a first and a second process; the first is smaller, since it also looks for balances."""
    first = [pair for index, pair in enumerate(pairs) if index % 5 < 2]
    second = [pair for index, pair in enumerate(pairs) if index % 5 >= 2]
    return first, second


class Planner:
    """Plays one workload on one cluster."""

    def __init__(self, workload: Workload, cluster: Cluster, links: LinkWorks | None = None) -> None:
        """`links`: time that links take from the processor the workload computes on, where that is known."""
        self.workload, self.cluster, self.links = workload, cluster, links or {}
        self._in_kinds = cluster.in_kinds()
        self._networks: dict[int, Network] = {}
        self.plays: Plays = {}
        """Step times by strategy and workers played; several numbers of workers may share one play."""
        self.alone_s = workload.compute_s
        """Seconds of a step of the fastest host alone, with nothing attached."""

    def play(self, strategy: Strategy, workers: int) -> StepTimes:
        """Steps of the strategy once it has settled; played once."""
        key = settled(strategy), workers
        if key not in self.plays:
            self.plays[key] = self._play(*key)
        return self.plays[key]

    def play_all(self, pairs: Sequence[tuple[Strategy, int]]) -> None:
        """Play those that can be played; predictions say why another cannot."""
        for strategy, workers in pairs:
            with suppress(SettingError):
                self.play(strategy, workers)

    def pairs(self, texts: Sequence[str], counts: Sequence[int]) -> list[tuple[Strategy, int]]:
        """The pairs that have to be played for these texts and counts, each once."""
        strategies = [settled(registry.from_text(text)) for text in texts]
        found = ((each, self._stand_in(each, workers)[0]) for workers in counts for each in strategies)
        return list(dict.fromkeys(found))

    def _play(self, strategy: Strategy, workers: int) -> StepTimes:
        work, cluster, link = self.workload, self._in_kinds, self.links.get(strategy)
        if not work.on_processor or workers == 1:
            return self._play_for(work, strategy, workers)
        if link is not None:  # before what it sends, and after what it receives: like the optimizer's step
            taken_s = cluster.shared * link.training_s + cluster.shared_beside * link.beside_s
            work = replace(work, optimizer_s=work.optimizer_s + taken_s)
        timed = self._play_for(work, strategy, workers)
        sending_s = cluster.processor_s_per_byte * self._hidden_bytes(timed, workers)
        if not sending_s:
            return timed
        return self._play_for(work.slowed(1 + sending_s / work.compute_s), strategy, workers)

    def _hidden_bytes(self, timed: StepTimes, workers: int) -> float:
        """Bytes of a step that travel while its worker computes: where it waits, its processor rests."""
        slowest = min(host.rate_bit_per_s for host in self.network(workers).description.hosts)
        sending_s = 8 * timed.sent_bytes / slowest
        return timed.sent_bytes * max(0.0, 1 - timed.exposed_s / sending_s) if sending_s else 0.0

    def _play_for(self, workload: Workload, strategy: Strategy, workers: int) -> StepTimes:
        model = ComputeModel(
            forward_s=workload.forward_s,
            backward_s=workload.backward_s,
            optimizer_s=workload.optimizer_s,
            shares=workload.shares,
            copy_s=self._copy_s(strategy),
            select_s=self._select_s(strategy),
        )
        return step_times(workload.shapes, self.network(workers), strategy, model, steps=2)

    def network(self, workers: int) -> Network:
        """The network of that many hosts; made once."""
        if workers not in self._networks:
            cluster = self._in_kinds
            self._networks[workers] = Network(
                cluster.describe(workers),
                latency_s=cluster.latency_s,
                uplink_latency_s=cluster.uplink_latency_s,
                hop_s=cluster.hop_s,
                segments=cluster.ring_segments,
            )
        return self._networks[workers]

    def scaled(self, times: float) -> Planner:
        """The planner of the same workload with `times` the batch per worker."""
        other = Planner(self.workload.times(times), self.cluster, self.links)
        other._networks = self._networks
        return other

    def ceiling_s(self, workers: int) -> float:
        """Seconds of a step of the slowest of that many workers if nothing had to be sent."""
        slowest = min(host.speed for host in self.network(workers).description.hosts)
        return self.workload.compute_s / slowest

    def _copy_s(self, strategy: Strategy) -> float:
        speed = self._in_kinds.copy_bytes_per_s
        return 0.0 if speed is None or strategy in self.links else 1 / speed  # else it is counted there

    def _select_s(self, strategy: Strategy) -> float:
        speed = self._in_kinds.select_numbers_per_s
        itemsize = 4
        if speed is None or not isinstance(strategy, SparseStrategy):
            return 0.0
        counted = min(1.0, self._in_kinds.shared_beside) if strategy in self.links else 0.0
        return (1 - counted) / (itemsize * speed)

    def predict(self, text: str, workers: int) -> Prediction:
        """Predict one strategy, as written on a command line, with that many workers."""
        name, given = registry.parse(text)
        strategy = registry.build(name, given)
        played, note = self._stand_in(strategy, workers)
        timed = self.play(strategy, played)
        spread = self.cluster.spread
        work, settings = self.workload, registry.resolved(strategy)
        num_steps = None if work.num_steps is None else work.num_steps // workers
        normalised, recipe = work.normalised, work.recipe
        loss = expected(name, settings, workers, recipe=recipe, num_steps=num_steps, normalised=normalised)
        return Prediction(
            strategy=text,
            workers=workers,
            step_s=timed.step_s,
            low_s=timed.step_s / (1 + spread),
            high_s=timed.step_s * (1 + spread),
            exposed_s=timed.exposed_s,
            sent_bytes=timed.sent_bytes,
            messages=timed.messages,
            memory_bytes=timed.held_bytes if workers > 1 else 0,
            efficiency=self.alone_s / timed.step_s,
            speedup=workers * self.alone_s / timed.step_s,
            loss=loss,
            note=note,
        )

    def _stand_in(self, strategy: Strategy, workers: int) -> tuple[int, str]:
        """The number of workers to play for `workers`, and a remark if it is another."""
        several = self.cluster.uplink_bit_per_s is not None
        if overrides(strategy, "serve") and workers > MOST_ONE_BY_ONE:
            return MOST_ONE_BY_ONE, f"played with {MOST_ONE_BY_ONE} workers"
        if several and workers > MOST_ON_SITES:
            return MOST_ON_SITES, f"played with {MOST_ON_SITES} workers"
        if isinstance(strategy, GTopK) and workers > FEW and workers & (workers - 1):
            rounded = 1 << workers.bit_length()
            return rounded, f"played with {rounded:,} workers"
        return workers, ""

    def predictions(
        self, texts: Sequence[str], counts: Sequence[int], told: Callable[[str], object] = lambda words: None
    ) -> Iterator[Prediction]:
        """All strategies with all numbers of workers; one that cannot be with so many is left out."""
        for workers in counts:
            for text in texts:
                try:
                    yield self.predict(text, workers)
                except SettingError as error:
                    told(f"{text} is left out with {workers} workers: {error.message}")
