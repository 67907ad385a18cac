"""What the simulator trains: the replicas of a recipe, each with its optimizer, samples and schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.data import Shards, Streams
from thinwire.errors import NumericError
from thinwire.recipes.base import Carried, Data, Plan, Training
from thinwire.recipes.config import RunConfig
from thinwire.recipes.held import block_of
from thinwire.recipes.keep import Course
from thinwire.recipes.lockstep import Lockstep
from thinwire.recipes.train import Result, Worker, batches_of_test, seed_of, shards_of
from thinwire.recipes.virtual_ring import VirtualRing
from thinwire.simulate.deal import Account, Deal, Hand, in_streams, in_turn
from thinwire.simulate.replicas import Replicas, worth_batching
from thinwire.simulate.session import Change
from thinwire.simulate.worker import VirtualWorker
from thinwire.wire.base import Work

Stepped = Callable[[int, float, int], None]
"""Told of every step: host, loss, number of samples."""


class RecipeLearner:
    """One replica and what goes with it."""

    def __init__(self, host: int, all_of_them: RecipeLearners) -> None:
        self.host = host
        self.model = all_of_them.replicas.model(host)
        self.clip_norm = all_of_them.training.clip_norm
        self.course = all_of_them.course(self.model)
        self._all = all_of_them
        self._batch: tuple[Tensor, Tensor] | None = None
        self._num_samples = 0
        self._ring: VirtualRing | None = None

    @property
    def optimizer(self) -> Optimizer:
        return self.course.optimizer

    def joined(self, worker: VirtualWorker) -> None:
        if self._all.config.shuffle == "ring":
            self._ring = VirtualRing(self._all.data, self._all.config.seed, *worker.beside("shuffle"))

    def begin(self, epoch: int) -> None:
        """Nothing of the epoch before is carried over."""
        self._all.replicas.forget(self.host)
        if self._ring is not None:
            self._ring.begin(epoch)

    def fetching(self) -> Iterator[Work]:
        if self._ring is not None and len(self._ring):
            batch_size = self._all.config.batch_size
            yield from self._ring.fetching(batch_size)
            self._all.deal.give(self._all.rank_of[self.host], self._ring.hand_out(batch_size))

    def settling(self) -> Iterator[Work]:
        if self._ring is not None:
            yield from self._ring.settling()

    def draw(self) -> bool:
        batch = self._all.deal.draw(self._all.rank_of[self.host])
        if batch is None:
            return False
        with self._all.replicas.random(self.host):
            inputs, targets = self._all.data.train.take(batch)
        self._batch = inputs.to(self._all.device), targets.to(self._all.device)
        self._num_samples = len(batch)
        return True

    def ask(self) -> None:
        assert self._batch is not None
        self._all.replicas.ask(self.host, *self._batch)

    def learn(self) -> None:
        self._all.replicas.learn(self.host)
        if not math.isfinite(self._all.replicas.loss(self.host)):
            raise NumericError(
                f"the worker on host {self.host}: the loss is {self._all.replicas.loss(self.host)}",
                hint="lower the learning rate, clip gradients, and look for NaN or huge values in the data",
            )

    def step(self) -> None:
        if self._all.lockstep is None:
            self.optimizer.step()
        else:
            self._all.lockstep.step(self.host)

    def stepped(self) -> None:
        if self._all.lockstep is None:
            self.course.step()
        self._all.deal.trained(self._all.rank_of[self.host])
        self._all.stepped(self.host, self._all.replicas.loss(self.host), self._num_samples)


class RecipeLearners:
    """All replicas of a recipe, by host."""

    def __init__(
        self,
        training: Training,
        data: Data,
        config: RunConfig,
        device: torch.device,
        stepped: Stepped,
        *,
        agree: bool,
        lockstep: bool = False,
        batched: bool | None = None,
    ) -> None:
        """`lockstep`: one step is made for all; they must agree, and stay the same workers to the end."""
        self.training, self.data, self.device, self.stepped = training, data, device, stepped
        self.config = config
        self._agree = agree
        self.hosts = tuple(range(config.workers))
        self.rank_of = {host: host for host in self.hosts}
        self.epoch = 0
        self.plan = self._plan()
        model = training.model().to(device)
        seeds = [seed_of(config.seed, host) for host in self.hosts]
        batched = worth_batching(self._example()[0]) if batched is None else batched
        self.replicas = Replicas(model, self._loss, seeds, batched=batched)
        self.learners = [RecipeLearner(host, self) for host in self.hosts]
        courses = [learner.course for learner in self.learners]
        self.lockstep = Lockstep(self.replicas, courses) if lockstep else None
        self.deal = self._deal()

    def of(self, host: int) -> RecipeLearner:
        return self.learners[host]

    def _loss(self, model: Any, inputs: Tensor, targets: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        outputs, carried = self.training.forward(model, inputs, carried)
        return self.training.loss(outputs, targets), carried

    def course(self, model: nn.Module) -> Course:
        """A fresh optimizer with its schedule."""
        return Course(self.training.optimizer(model, self.plan), self.training.schedule, self.plan)

    # -- epochs ---------------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Deal the samples of an epoch (the first is 0)."""
        self.epoch = epoch
        self.deal = self._deal()
        for host in self.hosts:
            self.learners[host].begin(epoch)

    def account(self) -> Account:
        """What became of this epoch's samples."""
        return self.deal.account()

    def _shards(self, rank: int) -> Shards | Streams:
        return shards_of(self.data, self.config, Worker(rank, len(self.hosts)))

    def _hand(self, rank: int) -> Hand:
        if self.config.shuffle == "ring":
            return []  # its batches are given to it as they arrive
        shards, first = self._shards(rank), 0
        if self.config.shuffle == "own":
            first = block_of(self.data, rank, len(self.hosts)).start
        shards.set_epoch(self.epoch)
        return [first + batch for batch in shards.batches(self.config.batch_size)]

    def _deal(self) -> Deal:
        hands = [self._hand(rank) for rank in range(len(self.hosts))]
        cut = in_streams if self.data.order == "streams" else in_turn
        return Deal(len(self.data.train), hands, self.config.batch_size, cut)

    def _plan(self) -> Plan:
        world_size, batch_size = len(self.hosts), self.config.batch_size
        num_steps = self.config.epochs * self._shards(0).num_batches(batch_size)
        return Plan(world_size=world_size, batch_size=batch_size, num_steps=num_steps)

    # -- who trains -----------------------------------------------------------------------------------

    def change(self, change: Change) -> None:
        """Go on with others: optimizers keep their moments, learning rates follow from the new plan.

        Replicas that agree go on from the furthest one; those that differ keep what they have. Who joins
        starts from the mean of those who were there, with the moments of the furthest.
        """
        before = [host for host in change.hosts if host not in change.joined]
        self.hosts, self.rank_of = change.hosts, {host: rank for rank, host in enumerate(change.hosts)}
        self.replicas.withdraw()
        self.deal.again(len(self.hosts))
        self.plan = self._plan()
        left = self.deal.num_batches(0) + (self.config.epochs - 1 - self.epoch) * (
            self.plan.num_steps // self.config.epochs
        )
        mean = self.replicas.mean(before)
        furthest = self.learners[change.furthest]
        for host in self.hosts:
            learner = self.learners[host]
            source = furthest if self._agree or host in change.joined else learner
            moments = deepcopy(source.optimizer.state_dict()["state"])
            if self._agree:
                self.replicas.copy_(host, furthest.model)
            elif host in change.joined:
                self.replicas.copy_(host, mean)
            learner.course = self.course(learner.model)
            fresh = learner.optimizer.state_dict()
            learner.optimizer.load_state_dict({**fresh, "state": moments})
            learner.course.restart(max(0, self.plan.num_steps - left))
        self.plan = replace(self.plan, num_steps=left)

    def measure(self, repeats: int = 5) -> float:
        """Seconds that one replica takes here for a step, on a copy that is thrown away."""
        model = deepcopy(self.replicas.model(0))
        optimizer = self.training.optimizer(model, self.plan)
        inputs, targets = self._example()
        with torch.random.fork_rng(devices=[]):
            return median(self._timed(model, optimizer, inputs, targets) for _ in range(repeats))

    def _example(self) -> tuple[Tensor, Tensor]:
        """A batch of the usual size."""
        with torch.random.fork_rng(devices=[]):
            inputs, targets = self.data.train.take(
                np.arange(min(self.config.batch_size, len(self.data.train)))
            )
        return inputs.to(self.device), targets.to(self.device)

    def _timed(self, model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor) -> float:
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        self._loss(model, inputs, targets, None)[0].backward()
        optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin_s


@torch.no_grad()
def judge(training: Training, data: Data, models: Sequence[nn.Module], device: torch.device) -> Result:
    """One model goes through all of the test data; several go through a part each."""
    loss_sum = score_sum = 0.0
    count = 0
    for rank, model in enumerate(models):
        model.eval()
        carried: Carried = None
        for batch in batches_of_test(data, rank, len(models)):
            inputs, targets = data.test.take(batch)
            outputs, carried = training.forward(model, inputs.to(device), carried)
            loss_sum += training.loss(outputs, targets.to(device)).item() * len(batch)
            score_sum += training.score(outputs, targets.to(device)).item()
            count += len(batch)
        model.train()
    return Result(training.metric(score_sum / count), loss_sum / count)
