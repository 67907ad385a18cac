"""Trains a recipe on the virtual clock, with the events of a real run.

The training is real: every worker's model, optimizer, samples and random numbers, and every number sent.
Time is virtual: `train_s` and everything derived from it are seconds of the clock. Evaluation takes none.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from thinwire.errors import SettingError, check
from thinwire.events import Evaluated, Event, EventWriter, Record, Summary
from thinwire.hosts.description import Description
from thinwire.recipes.base import Recipe
from thinwire.recipes.config import RunConfig, run_started
from thinwire.recipes.learners import RecipeLearners
from thinwire.recipes.meter import ProgressMeter, evaluate, summarize
from thinwire.recipes.setup import RunSetup, talks
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.session import Session
from thinwire.strategies import registry as strategies

Watch = Callable[[Event], object]
MAX_WRITERS = 64
"""Only the first workers write events; the summary counts all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualCluster:
    """The hosts, network and compute speed of a simulated run."""

    description: Description
    latency_s: float = 0.0
    uplink_latency_s: float = 0.0
    compute_s: float | None = None
    """Seconds a worker at full speed computes per step; None: what one replica takes here."""
    jitter: float = 0.0
    recovery_s: float = 0.0
    """Seconds until the remaining workers continue after a loss, or all after one has joined."""
    max_steps: int | None = None
    """Steps after which every worker stops, wherever it is in its epoch."""
    bucket_bytes: int | None = None
    """None: the default of `attach`."""

    def __post_init__(self) -> None:
        check(self.max_steps is None or self.max_steps >= 1, "steps", "at least 1", self.max_steps)

    def config(self, config: RunConfig) -> dict[str, object]:
        """Return the configuration of a run on this cluster as events and the run folder keep it."""
        faults = [str(fault) for fault in self.description.faults]
        cluster = {**asdict(self), "hosts": self.description.summary(), "faults": faults}
        del cluster["description"]
        return {**asdict(config), "clock": "virtual", "cluster": cluster}


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationResult:
    """The summary of a simulated run, and facts that a real run cannot know."""

    summary: Summary
    distance: float
    """Distance of the replicas from their mean at the end, relative to it."""
    compute_s: float
    batched: bool
    accounts: tuple[str, ...]
    """How often samples were used, by epoch, in words."""
    happened: tuple[str, ...]
    """Faults that came true."""


def simulate(
    recipe: Recipe,
    config: RunConfig,
    cluster: VirtualCluster,
    folder: Path,
    watch: Watch = lambda event: None,
) -> SimulationResult:
    """Train on virtual workers; events go into `folder`, and `watch` sees each as it is written."""
    changes = [fault for fault in cluster.description.faults if fault.kind in ("kill", "rejoin")]
    if changes and config.shuffle != "dealt":
        got = f"{config.shuffle!r} with {changes[0]}"
        raise SettingError(
            f"shuffle must be 'dealt' where workers are lost or join, got {got}",
            hint="what a worker holds is lost with it; a checkpoint brings it back, which is not simulated",
        )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), ExitStack() as files:
        # an LSTM's weights are rows of stacked tensors, which cuDNN copies together in every step
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
        num_writers = min(MAX_WRITERS, config.workers)
        writers = [files.enter_context(EventWriter(folder, rank)) for rank in range(num_writers)]

        def emit(host: int, record: Record) -> None:
            if host < len(writers):
                watch(writers[host].write(record))

        return _VirtualRun(RunSetup.load(recipe, config), cluster, emit).run()


class _VirtualRun:
    def __init__(self, setup: RunSetup, cluster: VirtualCluster, emit: Callable[[int, Record], None]) -> None:
        config = setup.config
        self._setup, self._emit = setup, emit
        self._strategy = strategies.build(config.strategy, config.settings)
        agree = self._strategy.replicas_agree
        # with overlap="forward" optimizers step bucket by bucket
        lockstep = agree and self._strategy.overlap != "forward" and not cluster.description.faults
        self._learners = RecipeLearners(setup, self._stepped, agree=agree, lockstep=lockstep)
        self._advice = setup.advice(cluster.max_steps or self._learners.plan.num_steps, log=True)
        self._compute_s = self._learners.measure() if cluster.compute_s is None else cluster.compute_s
        cluster = replace(cluster, compute_s=self._compute_s)  # events record the measured time
        latencies = {"latency_s": cluster.latency_s, "uplink_latency_s": cluster.uplink_latency_s}
        self._session = Session(
            Network(cluster.description, **latencies),
            self._strategy,
            self._learners,
            ComputeModel.of(self._compute_s, bucket_bytes=cluster.bucket_bytes),
            jitter=cluster.jitter,
            seed=config.seed,
            recovery_s=cluster.recovery_s,
        )
        if cluster.max_steps is not None:
            self._session.num_steps = cluster.max_steps
        self._epoch = 0
        self._meters = [
            ProgressMeter(
                rank=host,
                plan=self._learners.plan,
                num_epochs=config.epochs,
                stats=partial(self._session.stats, host),
                emit=partial(emit, host),
                clock=lambda: self._session.clock.now_s,
            )
            for host in range(config.workers)
        ]
        for host in range(config.workers):
            name = f"host{host} (virtual)" if config.workers > 1 else socket.gethostname()
            emit(host, run_started(cluster.config(config), config.workers, name))

    def _stepped(self, host: int, loss: float, num_samples: int) -> None:
        self._meters[host].stepped(loss, num_samples, self._epoch)

    def run(self) -> SimulationResult:
        accounts, session, learners, meters = [], self._session, self._learners, self._meters
        evaluated: Evaluated | None = None
        for epoch in range(1, self._setup.config.epochs + 1):
            self._epoch = epoch
            if epoch > 1:
                learners.begin(epoch - 1)
            for meter in meters:
                meter.start()
            session.epoch()
            for meter in meters:
                meter.pause()
            if learners.lockstep is not None:
                learners.lockstep.check()
            accounts.append(f"epoch {epoch}: {learners.deal.account()}")
            evaluated = self._evaluate()
            self._emit(0, evaluated)
            # max_steps is reached: the epochs left would be empty
            if session.stats(session.hosts[0]).steps >= session.num_steps:
                break
        assert evaluated is not None, "a run has at least one epoch"
        ended = [meter.ended() for meter in meters]
        for host, record in enumerate(ended):
            self._emit(host, record)
        instruments = [session.stats(host).instruments for host in session.hosts]  # lost workers have none
        summary = summarize(self._setup, evaluated, ended, instruments, self._advice)
        self._emit(0, summary)
        return SimulationResult(
            summary=summary,
            distance=evaluated.distance or 0.0,
            compute_s=self._compute_s,
            batched=learners.replicas.batched,
            accounts=tuple(accounts),
            happened=tuple(session.happened),
        )

    def _evaluate(self) -> Evaluated:
        """Evaluate one of several equal replicas, else their mean, or each by itself if they never talk."""
        replicas, hosts = self._learners.replicas, self._session.hosts
        if self._strategy.replicas_agree:
            models = {0: replicas.model(hosts[0])}
        elif talks(self._strategy):
            models = {0: replicas.mean(hosts)}
        else:
            models = {rank: replicas.model(host) for rank, host in enumerate(hosts)}
        return evaluate(
            self._setup,
            models,
            len(models),
            step=max(self._session.stats(host).steps for host in hosts),
            epoch=self._epoch,
            train_s=self._session.clock.now_s,
            distance=replicas.distance(hosts),
        )
