"""digits-cnn in float64: trained for real in threads or processes, and on the virtual clock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import thinwire as tw
from thinwire.data import Shards, ShuffleRing, Streams
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.base import Data, Plan, Samples, Training
from thinwire.recipes.config import RunConfig
from thinwire.recipes.held import hold, ring_of
from thinwire.recipes.images import GreyImages
from thinwire.recipes.keep import Course
from thinwire.recipes.learners import RecipeLearners
from thinwire.recipes.train import Worker, seed_of, shards_of
from thinwire.simulate.network import Network
from thinwire.simulate.pace import Compute
from thinwire.simulate.session import Session
from thinwire.simulate.worker import Ways
from thinwire.strategies.base import Strategy
from thinwire.wire.base import Wire

STEPS = 50
BATCH = 4
COMPUTE_S = 0.05
_loading = threading.Lock()
BUCKET_BYTES = 100_000
"""Several buckets: the model has 0.3 MB."""


@dataclass(frozen=True)
class Double(GreyImages):
    """Samples in float64."""

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        inputs, targets = GreyImages.take(self, indices)
        return inputs.double(), targets


def double(samples: Samples) -> Double:
    assert isinstance(samples, GreyImages)
    return Double(samples.inputs, samples.targets, samples.highest)


def training(*, dropout: bool) -> Training:
    """The recipe's, in float64, with or without its random part."""
    usual = registry.get("digits-cnn").training()

    def model() -> nn.Module:
        made = usual.model().double()
        for module in made.modules():
            if isinstance(module, nn.Dropout) and not dropout:
                module.p = 0.0
        return made

    def data(folder: object) -> Data:
        with _loading:  # numpy parses what it loads, which threads of Python 3.11 cannot do at once
            found = usual.data(None)
        return Data(double(found.train), double(found.test))

    return replace(usual, model=model, data=data)


def config(world_size: int, shuffle: str = "dealt") -> RunConfig:
    return RunConfig(
        recipe="digits-cnn",
        strategy="",
        settings={},
        workers=world_size,
        epochs=2,
        batch_size=BATCH,
        seed=0,
        data=None,
        device="cpu",
        shuffle=shuffle,
    )


def weights() -> dict[str, Tensor]:
    """What everybody starts from."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return training(dropout=True).model().state_dict()


def for_real(
    strategy: Strategy,
    wire: Wire | None,
    rank: int,
    world_size: int,
    start: dict[str, Tensor],
    *,
    dropout: bool,
    shuffle: str = "dealt",
) -> list[Tensor]:
    """One worker's parameters after some steps of an ordinary loop; `wire` None: the process group's."""
    parts, settings = training(dropout=dropout), config(world_size, shuffle)
    data = parts.data(None)
    shards: Shards | Streams | ShuffleRing = shards_of(data, settings, Worker(rank, world_size))
    num_steps = settings.epochs * shards.num_batches(settings.batch_size)
    plan = Plan(world_size=world_size, batch_size=settings.batch_size, num_steps=num_steps)
    model = parts.model()
    model.load_state_dict(start)
    optimizer = parts.optimizer(model, plan)
    course = Course(optimizer, parts.schedule, plan)
    done = 0
    with tw.attach(model, optimizer, strategy, process_group=wire, bucket_bytes=BUCKET_BYTES) as link:
        if dropout:
            torch.manual_seed(seed_of(settings.seed, rank))
        if shuffle != "dealt":
            data = hold(data, rank, world_size)
        if shuffle == "ring":
            shards = ring_of(data, settings, link)
        for epoch in range(settings.epochs):
            shards.set_epoch(epoch)
            for batch in shards.batches(settings.batch_size):
                if done == STEPS:
                    break
                inputs, targets = data.train.take(batch)
                optimizer.zero_grad()
                parts.loss(model(inputs), targets).backward()
                optimizer.step()
                course.step()
                done += 1
            link.settle()
        assert done == STEPS
    return [p.detach().clone() for p in model.parameters()]


def on_the_clock(
    strategy: Strategy,
    world_size: int,
    start: dict[str, Tensor],
    *,
    dropout: bool,
    batched: bool,
    lockstep: bool = False,
    slow: tuple[str, ...] = (),
    shuffle: str = "dealt",
    ended_s: dict[int, float] | None = None,
) -> tuple[list[list[Tensor]], Session]:
    """Every worker's parameters after the same steps, and the session.

    `ended_s` is told when each worker, by host, had done them.
    """
    ended_s = {} if ended_s is None else ended_s
    settings, parts = config(world_size, shuffle), training(dropout=dropout)
    learners = RecipeLearners(
        parts,
        parts.data(None),
        settings,
        torch.device("cpu"),
        lambda host, *_: ended_s.update({host: session.clock.now_s}),
        agree=strategy.replicas_agree,
        lockstep=lockstep,
        batched=batched,
    )
    for host in range(world_size):
        learners.replicas.model(host).load_state_dict(start)
    network = Network(describe(hosts=world_size, rate="100mbit", slow=slow), latency_s=0.001)
    ways = Ways(compute=Compute.of(COMPUTE_S), bucket_bytes=BUCKET_BYTES)
    session = Session(network, strategy, learners, ways)
    session.num_steps = STEPS
    for epoch in range(settings.epochs):
        if epoch:
            learners.begin(epoch)
        session.epoch()
        if learners.lockstep is not None:
            learners.lockstep.check()
    assert all(session.stats(host).steps == STEPS for host in session.hosts)
    models = [learners.replicas.model(host) for host in session.hosts]
    return [[p.detach().clone() for p in model.parameters()] for model in models], session
