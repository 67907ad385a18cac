"""Trains a recipe on the virtual clock, with the events of a real run.

The training is real: every worker's model, optimizer, samples and random numbers, and every number sent.
Time is virtual: `train_s` and everything derived from it are seconds of the clock. Evaluation takes none.
"""

from __future__ import annotations

import math
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from thinwire.errors import SettingError, check
from thinwire.event_log import EventWriter
from thinwire.events import Evaluated, Event, Record, Summary
from thinwire.hosts.description import Description
from thinwire.recipes.base import Recipe
from thinwire.recipes.config import RunConfig, run_started
from thinwire.recipes.learners import RecipeLearners
from thinwire.recipes.meter import ProgressMeter, evaluate, summarize
from thinwire.recipes.setup import RunSetup, talks
from thinwire.recipes.virtual_shrinking import join
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.session import Session
from thinwire.strategies import registry as strategies

Watch = Callable[[Event], object]
Emit = Callable[[int, Record], None]
"""Takes the record of a host."""
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
    with ExitStack() as files:
        num_writers = min(MAX_WRITERS, config.workers)
        writers = [files.enter_context(EventWriter(folder, rank)) for rank in range(num_writers)]

        def emit(host: int, record: Record) -> None:
            if host < len(writers):
                watch(writers[host].write(record))

        with virtual_training(recipe, config, cluster, emit) as training:
            while not training.done:
                training.epoch()
            return training.result()


@contextmanager
def virtual_training(
    recipe: Recipe, config: RunConfig, cluster: VirtualCluster, emit: Emit = lambda host, record: None
) -> Iterator[VirtualTraining]:
    """A run on virtual workers that its user takes through its epochs; torch's random numbers are its own."""
    changes = [fault for fault in cluster.description.faults if fault.kind in ("kill", "rejoin")]
    if changes and config.shuffle != "dealt":
        got = f"{config.shuffle!r} with {changes[0]}"
        raise SettingError(
            f"shuffle must be 'dealt' where workers are lost or join, got {got}",
            hint="what a worker holds is lost with it; a checkpoint brings it back, which is not simulated",
        )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # an LSTM's weights are rows of stacked tensors, which cuDNN copies together in every step
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")
        yield VirtualTraining(RunSetup.load(recipe, config), cluster, emit)


class VirtualTraining:
    """A simulated run, epoch by epoch; between two epochs it can be saved, and continued by another process.

    A continued run gives the same bits as one that was never interrupted. Only strategies that measure the
    wire ("auto") measure it anew, as after every checkpoint.
    """

    def __init__(self, setup: RunSetup, cluster: VirtualCluster, emit: Emit) -> None:
        config = setup.config
        self._setup, self._emit = setup, emit
        self._strategy = strategies.build(config.strategy, config.settings)
        agree = self._strategy.replicas_agree
        # with overlap="forward" optimizers step bucket by bucket
        lockstep = agree and self._strategy.overlap != "forward" and not cluster.description.faults
        self._learners = RecipeLearners(setup, self._stepped, agree=agree, lockstep=lockstep)
        self._advice = setup.advice(cluster.max_steps or self._learners.plan.num_steps, log=True)
        self._given_s, self._bucket_bytes = cluster.compute_s, cluster.bucket_bytes
        self._compute_s = self._learners.measure() if cluster.compute_s is None else cluster.compute_s
        cluster = replace(cluster, compute_s=self._compute_s)  # events record the measured time
        self._session = Session(
            Network(
                cluster.description, latency_s=cluster.latency_s, uplink_latency_s=cluster.uplink_latency_s
            ),
            self._strategy,
            self._learners,
            ComputeModel.of(self._compute_s, bucket_bytes=cluster.bucket_bytes),
            jitter=cluster.jitter,
            seed=config.seed,
            recovery_s=cluster.recovery_s,
        )
        self._shrinking = join(config, self._session, self._learners, self._compute, partial(self._emit, 0))
        self._max_steps = math.inf if cluster.max_steps is None else cluster.max_steps
        self._session.num_steps = self._max_steps
        self.evaluations: list[Evaluated] = []
        """One for each epoch that is over."""
        self._epoch = 0
        self._accounts: list[str] = []
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

    def _compute(self) -> ComputeModel:
        """How long a step takes now: with a time that was given, always that."""
        seconds = self._learners.measure() if self._given_s is None else self._given_s
        return ComputeModel.of(seconds, bucket_bytes=self._bucket_bytes)

    def _stepped(self, host: int, loss: float, num_samples: int) -> None:
        if self._shrinking is not None:
            self._shrinking.stepped(host, loss)
        self._meters[host].stepped(loss, num_samples, self._epoch)

    @property
    def done(self) -> bool:
        """Whether all epochs are over, or `max_steps` is reached: the epochs left would be empty."""
        session = self._session
        stopped = session.stats(session.hosts[0]).steps >= session.num_steps
        return self._epoch == self._setup.config.epochs or stopped

    @property
    def sent_bytes(self) -> int:
        """The bytes that all workers together have sent so far."""
        return sum(int(meter.totals.get("sent_bytes", 0)) for meter in self._meters)

    def epoch(self) -> Evaluated:
        """Train one epoch, and evaluate."""
        self._epoch += 1
        if self._epoch > 1:
            self._learners.begin(self._epoch - 1)
        for meter in self._meters:
            meter.start()
        self._train()
        for meter in self._meters:
            meter.pause()
        if self._learners.lockstep is not None:
            self._learners.lockstep.check()
        self._accounts.append(f"epoch {self._epoch}: {self._learners.deal.account()}")
        self.evaluations.append(self._evaluate())
        self._emit(0, self.evaluations[-1])
        return self.evaluations[-1]

    def _train(self) -> None:
        """Train until the batches of this epoch are over; apoptosis acts where all have come to its step."""
        session, shrinking = self._session, self._shrinking
        if shrinking is None:
            session.epoch()
            return
        while True:
            due = shrinking.next_step
            session.num_steps = min(self._max_steps, due)
            session.epoch()
            steps = session.stats(session.hosts[0]).steps
            if steps == due:
                taken_s = shrinking.act()
                if self._given_s is None:
                    session.clock.run(until=session.clock.sleep(taken_s).done)
            if steps < session.num_steps or steps >= self._max_steps:
                break
        session.num_steps = self._max_steps

    def result(self) -> SimulationResult:
        """Sum up the run, once it is done."""
        assert self.evaluations, "a run has at least one epoch"
        session, evaluated = self._session, self.evaluations[-1]
        ended = [meter.ended() for meter in self._meters]
        for host, record in enumerate(ended):
            self._emit(host, record)
        instruments = [session.stats(host).instruments for host in session.hosts]  # lost workers have none
        summary = summarize(self._setup, evaluated, ended, instruments, self._advice)
        self._emit(0, summary)
        return SimulationResult(
            summary=summary,
            distance=evaluated.distance or 0.0,
            compute_s=self._compute_s,
            batched=self._learners.replicas.batched,
            accounts=tuple(self._accounts),
            happened=tuple(session.happened),
        )

    def state_dict(self) -> dict[str, Any]:
        """The run after the epochs that are over, for `torch.save`."""
        if self._setup.config.shuffle == "ring":
            raise SettingError(
                "shuffle must be 'dealt' or 'own' in a simulation that is saved, got 'ring'",
                hint="run it in one go",
            )
        given = self._setup.config.apoptosis
        check(not given, "apoptosis", "left out in a simulation that is saved", given)
        on_gpu = self._setup.device.type == "cuda"
        return {
            "epoch": self._epoch,
            "evaluations": [asdict(each) for each in self.evaluations],
            "accounts": list(self._accounts),
            "meters": [meter.state_dict() for meter in self._meters],
            "learners": self._learners.state_dict(),
            "session": self._session.state_dict(),
            "random": torch.get_rng_state(),
            "gpu_random": torch.cuda.get_rng_state(self._setup.device) if on_gpu else None,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue a run that was saved with the same settings; call it before the first epoch."""
        self._epoch = saved["epoch"]
        self.evaluations = [Evaluated(**each) for each in saved["evaluations"]]
        self._accounts = list(saved["accounts"])
        for meter, counts in zip(self._meters, saved["meters"], strict=True):
            meter.load_state_dict(counts)
        self._learners.load_state_dict(saved["learners"])
        self._session.load_state_dict(saved["session"])
        torch.set_rng_state(saved["random"])
        if saved["gpu_random"] is not None:
            torch.cuda.set_rng_state(saved["gpu_random"], self._setup.device)

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
