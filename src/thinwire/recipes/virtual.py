"""Trains a recipe on the virtual clock, and says so in the same events as a real run.

What is trained is real: every worker's model, optimizer, samples and random numbers, and every number that
is sent. Time is virtual: `train_s` and all that follows from it are seconds of the clock. Evaluation takes
none of them.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from thinwire.errors import check
from thinwire.events import Evaluated, Event, EventWriter, Record, RunEnded, RunStarted, Summary
from thinwire.hosts.description import Description
from thinwire.recipes.base import Recipe
from thinwire.recipes.config import RunConfig, versions
from thinwire.recipes.devices import choose_device
from thinwire.recipes.joined import caution_of
from thinwire.recipes.learners import RecipeLearners, judge
from thinwire.recipes.meter import Meter
from thinwire.recipes.train import Result
from thinwire.recipes.virtual_ring import check_changes
from thinwire.simulate.network import Network
from thinwire.simulate.pace import Compute
from thinwire.simulate.session import Session
from thinwire.simulate.worker import Ways
from thinwire.strategies import registry as strategies
from thinwire.strategies.base import overrides

WRITERS = 64
"""Workers that write events at most, the first ones; the summary counts all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What is virtual in a run."""

    description: Description
    latency_s: float = 0.0
    uplink_latency_s: float = 0.0
    compute_s: float | None = None
    """Seconds a worker at full speed computes per step; None: what one replica takes here."""
    jitter: float = 0.0
    recovery_s: float = 0.0
    """Seconds until those who are left go on after a loss, or all after somebody has joined."""
    max_steps: int | None = None
    """Steps after which every worker stops, wherever it is in its epoch."""
    bucket_bytes: int | None = None
    """None: what `attach` would take."""

    def __post_init__(self) -> None:
        check(self.max_steps is None or self.max_steps >= 1, "steps", "at least 1", self.max_steps)

    def plain(self) -> dict[str, object]:
        """As the run's config keeps it."""
        settings = asdict(self)
        settings.pop("description")
        faults = [str(fault) for fault in self.description.faults]
        return {**settings, "hosts": self.description.summary(), "faults": faults}


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """What came of a simulation."""

    summary: Summary
    distance: float
    """Of the replicas from their mean at the end, relative to it."""
    compute_s: float
    batched: bool
    accounts: tuple[str, ...]
    """What became of the samples, by epoch, in words."""
    happened: tuple[str, ...]
    """Faults that came true."""


def config_of(config: RunConfig, cluster: Cluster) -> dict[str, object]:
    """The configuration as events and the run folder keep it."""
    return {**asdict(config), "clock": "virtual", "cluster": cluster.plain()}


def simulate(
    recipe: Recipe,
    config: RunConfig,
    cluster: Cluster,
    folder: Path,
    watch: Callable[[Event], object] = lambda event: None,
    *,
    batched: bool | None = None,
) -> Simulated:
    """Train on virtual workers; events go into `folder`, and `watch` sees each as it is written."""
    check_changes(config.shuffle, cluster.description.faults)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), ExitStack() as files:
        # an LSTM's weights are rows of stacked tensors, which cuDNN copies together in every step
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
        writers = [
            files.enter_context(EventWriter(folder, rank)) for rank in range(min(WRITERS, config.workers))
        ]

        def emit(host: int, record: Record) -> None:
            if host < len(writers):
                watch(writers[host].write(record))

        return _Run(recipe, config, cluster, emit, batched).whole()


class _Run:
    """One run of `simulate`."""

    def __init__(
        self,
        recipe: Recipe,
        config: RunConfig,
        cluster: Cluster,
        emit: Callable[[int, Record], None],
        batched: bool | None,
    ) -> None:
        torch.manual_seed(config.seed)
        self._recipe, self._config, self._emit = recipe, config, emit
        self._device = choose_device(config.device, 0)
        self._training = recipe.training()
        with self._device:
            self._data = self._training.data(config.data_folder)
        self._strategy = strategies.build(config.strategy, config.settings)
        self._learners = RecipeLearners(
            self._training,
            self._data,
            config,
            self._device,
            self._stepped,
            agree=self._strategy.replicas_agree,
            lockstep=self._strategy.replicas_agree
            and self._strategy.overlap != "forward"  # there optimizers step bucket by bucket
            and not cluster.description.faults,
            batched=batched,
        )
        num_steps = cluster.max_steps or self._learners.plan.num_steps
        self._caution = caution_of(config, num_steps, tell=True)
        self.compute_s = self._learners.measure() if cluster.compute_s is None else cluster.compute_s
        cluster = replace(cluster, compute_s=self.compute_s)
        network = Network(
            cluster.description, latency_s=cluster.latency_s, uplink_latency_s=cluster.uplink_latency_s
        )
        self._session = Session(
            network,
            self._strategy,
            self._learners,
            Ways(compute=Compute.of(self.compute_s), bucket_bytes=cluster.bucket_bytes),
            jitter=cluster.jitter,
            seed=config.seed,
            recovery_s=cluster.recovery_s,
        )
        if cluster.max_steps is not None:
            self._session.num_steps = cluster.max_steps
        self._meters = {host: self._meter(host) for host in self._learners.hosts}
        self._epoch = 0
        for host in self._meters:
            emit(
                host,
                RunStarted(
                    config=config_of(config, cluster),
                    versions=versions(),
                    host=f"host{host} (virtual)" if config.workers > 1 else socket.gethostname(),
                    pid=os.getpid(),
                    world_size=config.workers,
                ),
            )

    def _meter(self, host: int) -> Meter:
        return Meter(
            rank=host,
            plan=self._learners.plan,
            num_epochs=self._config.epochs,
            stats=lambda: self._session.stats(host),
            emit=lambda record: self._emit(host, record),
            clock=lambda: self._session.clock.now_s,
        )

    def _stepped(self, host: int, loss: float, num_samples: int) -> None:
        self._meters[host].stepped(loss, num_samples, self._epoch)

    def whole(self) -> Simulated:
        """All epochs."""
        accounts, result, distance = [], Result(0.0, 0.0), 0.0
        for epoch in range(1, self._config.epochs + 1):
            self._epoch = epoch
            if epoch > 1:
                self._learners.begin(epoch - 1)
            for meter in self._meters.values():
                meter.start()
            self._session.epoch()
            if self._learners.lockstep is not None:
                self._learners.lockstep.check()
            for meter in self._meters.values():
                meter.pause()
            accounts.append(f"epoch {epoch}: {self._learners.account()}")
            result, distance = self._judge(), self._learners.replicas.distance(self._session.hosts)
            self._emit(0, self._evaluated(epoch, result, distance))
            if self._session.stats(self._session.hosts[0]).steps >= self._session.num_steps:
                break
        ended = [self._end(host) for host in self._meters]
        summary = self._summary(result, ended)
        self._emit(0, summary)
        return Simulated(
            summary=summary,
            distance=distance,
            compute_s=self.compute_s,
            batched=self._learners.replicas.batched,
            accounts=tuple(accounts),
            happened=tuple(self._session.happened),
        )

    def _judge(self) -> Result:
        """Replicas that agree by one of them, those that talk by their mean, others each by itself."""
        replicas, hosts = self._learners.replicas, self._session.hosts
        talks = overrides(self._strategy, "reduce") or overrides(self._strategy, "mix")
        if self._strategy.replicas_agree:
            models = [replicas.model(hosts[0])]
        elif talks:
            models = [replicas.mean(hosts)]
        else:
            models = [replicas.model(host) for host in hosts]
        return judge(self._training, self._data, models, self._device)

    def _evaluated(self, epoch: int, result: Result, distance: float) -> Evaluated:
        return Evaluated(
            step=max(self._session.stats(host).steps for host in self._session.hosts),
            epoch=epoch,
            metric=self._recipe.target.metric,
            value=result.value,
            loss=result.loss,
            train_s=self._session.clock.now_s,
            distance=distance,
        )

    def _instruments(self) -> dict[str, float]:
        """Averaged over the workers who are there at the end."""
        told = [self._session.stats(host).instruments for host in self._session.hosts]
        return {name: sum(each[name] for each in told) / len(told) for name in told[0]}

    def _end(self, host: int) -> RunEnded:
        ended = self._meters[host].ended()
        self._emit(host, ended)
        return ended

    def _summary(self, result: Result, ended: list[RunEnded]) -> Summary:
        config, target = self._config, self._recipe.target
        train_s = max(self._session.clock.now_s, 1e-9)
        steps = max(each.steps for each in ended)
        sent_bytes = sum(each.sent_bytes for each in ended)
        return Summary(
            recipe=self._recipe.name,
            strategy=config.strategy,
            settings=config.settings,
            workers=config.workers,
            epochs=config.epochs,
            steps=steps,
            metric=target.metric,
            value=result.value,
            target=target.value,
            reached=target.reached_by(result.value),
            loss=result.loss,
            train_s=train_s,
            samples_per_s=sum(each.samples for each in ended) / train_s,
            sent_bytes=sent_bytes,
            sent_bytes_per_step=sent_bytes / len(ended) / steps,
            messages=sum(each.messages for each in ended),
            exposed_share=sum(each.exposed_s for each in ended) / len(ended) / train_s,
            instruments=self._instruments(),
            caution=self._caution,
        )
