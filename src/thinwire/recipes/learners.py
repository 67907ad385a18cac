"""The replicas of a recipe on the virtual clock, each with its optimizer, samples and schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from copy import deepcopy
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.data.ring import SampleExchange, Start
from thinwire.data.sample_table import SampleTable
from thinwire.errors import UsageError
from thinwire.recipes.base import Data
from thinwire.recipes.meter import check_loss
from thinwire.recipes.setup import LRSchedule, RunSetup, block_range, sample_tensors, worker_seed
from thinwire.simulate.deal import Deal, Hand, in_streams, in_turn
from thinwire.simulate.replicas import Replicas, worth_batching
from thinwire.simulate.worker import Learner, VirtualWorker
from thinwire.wire.base import Lane
from thinwire.wire.work import Work

INDEX_BYTES = 8
Stepped = Callable[[int, float, int], None]
"""Called after every step with host, loss and number of samples."""


class Lockstep:
    """Replicas with the same parameters and gradients make the same step: the first one's optimizer makes it
    for all, as soon as any is to step. A reduced gradient contains everybody's: none needs old parameters."""

    def __init__(self, replicas: Replicas, schedules: Sequence[LRSchedule]) -> None:
        self._replicas, self._schedules = replicas, schedules
        self._steps = [0] * len(schedules)  # asked for, by replica

    def step(self, index: int) -> None:
        """Step replica `index` with the gradients that it has."""
        is_new = self._steps[index] == max(self._steps)
        self._steps[index] += 1
        if is_new:
            first, *others = self._schedules
            with self._replicas.lending_gradients(index, to=0):
                first.optimizer.step()
            self._replicas.spread_()
            first.step()
            for schedule in others:
                schedule.follow(first)

    @property
    def steps(self) -> list[int]:
        """Steps asked for, by replica."""
        return list(self._steps)

    @steps.setter
    def steps(self, steps: Sequence[int]) -> None:
        self._steps = list(steps)

    def check(self) -> None:
        """Refuse replicas whose gradients differ; called between epochs, when nothing is on the wire."""
        for index in range(1, len(self._schedules)):
            if not self._replicas.same_gradients(0, index):
                raise UsageError(
                    "replicas_agree of a strategy must be False if workers apply different gradients, got "
                    f"True: those of workers 0 and {index} differ in step {max(self._steps)}",
                    hint="let reduce leave the same bits in the bucket on every worker",
                )


class VirtualRing:
    """One worker's shuffle ring on the virtual clock. Only a sample's index travels, padded to its size."""

    def __init__(self, data: Data, seed: int, lane: Lane, start: Start) -> None:
        blocks = [block_range(data, rank, lane.world_size) for rank in range(lane.world_size)]
        own = blocks[lane.rank]
        num_bytes = sum(tensor[0].nbytes for tensor in sample_tensors(data.train).values())
        self._rows = torch.zeros(len(own), max(INDEX_BYTES, num_bytes), dtype=torch.uint8)
        self._rows[:, :INDEX_BYTES] = torch.tensor(own).unsqueeze(1).view(torch.uint8)
        table, counts = SampleTable([self._rows]), [len(block) for block in blocks]
        self.exchange = SampleExchange(table, counts, seed=seed, uneven=False, rank=lane.rank, start=start)

    def hand_out(self, batch_size: int) -> NDArray[np.int64]:
        """Return the indices of the next batch's samples, which have arrived."""
        places = torch.from_numpy(self.exchange.hand_out(batch_size))
        indices: NDArray[np.int64] = self._rows[places, :INDEX_BYTES].view(torch.int64).squeeze(1).numpy()
        return indices


class RecipeLearner(Learner):
    """One replica with its optimizer and its samples."""

    def __init__(self, host: int, group: RecipeLearners) -> None:
        self.host = host
        self.model = group.replicas.model(host)
        self.clip_norm = group.setup.training.clip_norm
        self._group = group
        self.restart()
        self._batch: tuple[Tensor, Tensor] | None = None
        self._num_samples = 0
        self._ring: VirtualRing | None = None

    def restart(self) -> None:
        """Take a new optimizer, with the learning rates of the group's plan."""
        self.schedule = LRSchedule(self._group.setup.training, self.model, self._group.plan)
        self.optimizer = self.schedule.optimizer

    def joined(self, worker: VirtualWorker) -> None:
        setup = self._group.setup
        if setup.config.shuffle == "ring":
            side_lane = worker.core.side_lane("shuffle", worker.driver)
            self._ring = VirtualRing(setup.data, setup.config.seed, *side_lane)

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets that were drawn last."""
        assert self._batch is not None
        return self._batch

    def begin(self, epoch: int) -> None:
        self._group.replicas.forget(self.host)  # nothing is carried over from the epoch before
        if self._ring is not None:
            self._ring.exchange.begin(epoch)

    def fetching(self) -> Iterator[Work]:
        if self._ring is not None and len(self._ring.exchange):
            batch_size = self._group.setup.config.batch_size
            yield from self._ring.exchange.fetching(batch_size)
            self._group.deal.give(self._group.rank_of[self.host], self._ring.hand_out(batch_size))

    def settling(self) -> Iterator[Work]:
        if self._ring is not None:
            yield from self._ring.exchange.settling()

    def draw(self) -> bool:
        batch = self._group.deal.draw(self._group.rank_of[self.host])
        if batch is None:
            return False
        with self._group.replicas.random(self.host):  # crops come from the worker's own generator
            self._batch = self._group.setup.take(self._group.setup.data.train, batch)
        self._num_samples = len(batch)
        return True

    def ask(self) -> None:
        self._group.replicas.ask(self.host, *self.batch)

    def learn(self) -> None:
        self._group.replicas.learn(self.host)
        check_loss(self._group.replicas.loss(self.host), f"the worker on host {self.host}")

    def step(self) -> None:
        if self._group.lockstep is None:
            self.optimizer.step()
        else:
            self._group.lockstep.step(self.host)

    def stepped(self) -> None:
        if self._group.lockstep is None:  # which has stepped the schedule itself
            self.schedule.step()
        self._group.deal.trained(self._group.rank_of[self.host])
        self._group.stepped(self.host, self._group.replicas.loss(self.host), self._num_samples)


class RecipeLearners:
    """All replicas of a recipe, by host."""

    def __init__(self, setup: RunSetup, stepped: Stepped, *, agree: bool, lockstep: bool = False) -> None:
        """`lockstep`: one step is made for all; they must agree, and stay the same workers to the end."""
        self.setup, self.stepped = setup, stepped
        self._agree = agree
        self.hosts = tuple(range(setup.config.workers))
        self.rank_of = {host: host for host in self.hosts}
        self.epoch = 0
        self.plan = setup.plan(len(self.hosts))
        model = setup.training.model().to(setup.device)
        seeds = [worker_seed(setup.config.seed, host) for host in self.hosts]
        self.replicas = Replicas(model, setup.loss, seeds, batched=worth_batching(self._example()[0]))
        self.learners = [RecipeLearner(host, self) for host in self.hosts]
        schedules = [learner.schedule for learner in self.learners]
        self.lockstep = Lockstep(self.replicas, schedules) if lockstep else None
        self.deal = self._deal()

    def of(self, host: int) -> RecipeLearner:
        return self.learners[host]

    def begin(self, epoch: int) -> None:
        """Deal the samples of an epoch (the first is 0)."""
        self.epoch = epoch
        self.deal = self._deal()
        for host in self.hosts:
            self.learners[host].begin(epoch)

    def _deal(self) -> Deal:
        data, batch_size = self.setup.data, self.setup.config.batch_size
        hands = [self._hand(rank) for rank in range(len(self.hosts))]
        return Deal(len(data.train), hands, batch_size, in_streams if data.order == "streams" else in_turn)

    def _hand(self, rank: int) -> Hand:
        config, data, world_size = self.setup.config, self.setup.data, len(self.hosts)
        if config.shuffle == "ring":
            return []  # its batches are given to it as they arrive
        first = block_range(data, rank, world_size).start if config.shuffle == "own" else 0
        shards = self.setup.shards(rank, world_size)
        shards.set_epoch(self.epoch)
        return [first + batch for batch in shards.batches(config.batch_size)]

    def change(self, hosts: tuple[int, ...], joined: Collection[int], furthest: int) -> None:
        """Continue with other workers: optimizers keep their moments, learning rates follow the new plan.

        Replicas that agree continue from the furthest one; those that differ keep their own parameters. A
        worker that joins starts from the mean of those who were there, with the moments of the furthest.
        """
        self.hosts, self.rank_of = hosts, {host: rank for rank, host in enumerate(hosts)}
        self.replicas.withdraw()  # batches drawn for the step that was given up
        self.deal.again(len(hosts))
        self.plan = self.setup.plan(len(hosts))
        left = self.setup.steps_left(self.plan, self.epoch, self.deal.num_batches(0))
        mean = self.replicas.mean([host for host in hosts if host not in joined])
        ahead = self.learners[furthest]
        for host in hosts:
            learner = self.learners[host]
            source = ahead if self._agree or host in joined else learner
            moments = deepcopy(source.optimizer.state_dict()["state"])
            if self._agree or host in joined:
                self.replicas.copy_(host, ahead.model if self._agree else mean)
            learner.restart()
            learner.optimizer.load_state_dict({**learner.optimizer.state_dict(), "state": moments})
            learner.schedule.restart(max(0, self.plan.num_steps - left))

    def state_dict(self) -> dict[str, Any]:
        """All replicas and optimizers between two epochs."""
        return {
            "replicas": self.replicas.state_dict(),
            "optimizers": [learner.optimizer.state_dict() for learner in self.learners],
            "schedules": [learner.schedule.state_dict() for learner in self.learners],
            "lockstep": None if self.lockstep is None else self.lockstep.steps,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.replicas.load_state_dict(saved["replicas"])
        for learner, optimizer, schedule in zip(
            self.learners, saved["optimizers"], saved["schedules"], strict=True
        ):
            learner.optimizer.load_state_dict(optimizer)
            learner.schedule.load_state_dict(schedule)
        if self.lockstep is not None:
            self.lockstep.steps = saved["lockstep"]

    def measure(self, repeats: int = 5) -> float:
        """Return the seconds that one replica takes here for a step, measured on a copy."""
        times_s = list[float]()

        def watch(seconds: float) -> None:
            times_s.append(seconds)

        self.trial(repeats, watch)
        return median(times_s)

    def trial(self, steps: int, watch: Callable[[float], None] = lambda seconds: None) -> None:
        """Make steps of one replica's copy on one fixed batch; `watch` gets the seconds of each."""
        model = deepcopy(self.replicas.model(0))  # the replica itself must not take a step
        optimizer = self.setup.training.optimizer(model, self.plan)
        inputs, targets = self._example()
        with torch.random.fork_rng(devices=[]):
            for _ in range(steps):
                begin_s = time.perf_counter()
                optimizer.zero_grad()
                self.setup.loss(model, inputs, targets, None)[0].backward()
                optimizer.step()
                if self.setup.device.type == "cuda":
                    torch.cuda.synchronize(self.setup.device)
                watch(time.perf_counter() - begin_s)

    def _example(self) -> tuple[Tensor, Tensor]:
        samples = self.setup.data.train
        with torch.random.fork_rng(devices=[]):
            return self.setup.take(samples, np.arange(min(self.setup.config.batch_size, len(samples))))
