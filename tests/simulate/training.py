"""digits-cnn in float64: trained for real in threads or processes, and on the virtual clock."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.data import Shards, ShuffleRing, Streams
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.base import Data, Samples, Training
from thinwire.recipes.config import RunConfig
from thinwire.recipes.learners import RecipeLearners
from thinwire.recipes.samples import TensorSamples
from thinwire.recipes.setup import LRSchedule, RunSetup, own_part, worker_seed
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.session import Session
from thinwire.strategies.base import Strategy
from thinwire.wire.base import Lane

STEPS = 20
"""All that strategies do every few steps happens in these; float64 shows any difference at once."""
BATCH = 4
COMPUTE_S = 0.05
_loading = threading.Lock()
BUCKET_BYTES = 100_000
"""Several buckets: the model has 0.3 MB."""


def double(samples: Samples) -> TensorSamples:
    """Samples in float64."""
    assert isinstance(samples, TensorSamples)
    convert = samples.convert
    return replace(samples, convert=lambda inputs: convert(inputs).double())


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


def setup(world_size: int, shuffle: str, *, dropout: bool) -> RunSetup:
    """A run without a seed of its own: everybody starts from the same `weights`."""
    parts, recipe = training(dropout=dropout), registry.get("digits-cnn")
    return RunSetup(recipe, config(world_size, shuffle), parts, parts.data(None), torch.device("cpu"))


def weights() -> dict[str, Tensor]:
    """What everybody starts from."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return training(dropout=True).model().state_dict()


def for_real(
    strategy: Strategy,
    lane: Lane | None,
    rank: int,
    world_size: int,
    start: dict[str, Tensor],
    *,
    dropout: bool,
    shuffle: str = "dealt",
) -> list[Tensor]:
    """One worker's parameters after some steps of an ordinary loop; `lane` None: the process group's."""
    run = setup(world_size, shuffle, dropout=dropout)
    parts, settings, data = run.training, run.config, run.data
    shards: Shards | Streams | ShuffleRing = run.shards(rank, world_size)
    model = parts.model()
    model.load_state_dict(start)
    schedule = LRSchedule(parts, model, run.plan(world_size))
    optimizer = schedule.optimizer
    done = 0
    with tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=BUCKET_BYTES) as link:
        if dropout:
            torch.manual_seed(worker_seed(settings.seed, rank))
        if shuffle != "dealt":
            data = own_part(data, rank, world_size)
        if shuffle == "ring":
            shards = replace(run, data=data).shuffle_ring(link)
        for epoch in range(settings.epochs):
            shards.set_epoch(epoch)
            for batch in shards.batches(settings.batch_size):
                if done == STEPS:
                    break
                inputs, targets = data.train.take(batch)
                optimizer.zero_grad()
                parts.loss(model(inputs), targets).backward()
                optimizer.step()
                schedule.step()
                done += 1
            link.synchronize()
        assert done == STEPS
        return [p.detach().clone() for p in model.parameters()]  # before detach, which may average


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
    with patch("thinwire.recipes.learners.worth_batching", lambda _: batched):
        learners = RecipeLearners(
            setup(world_size, shuffle, dropout=dropout),
            lambda host, *_: ended_s.update({host: session.clock.now_s}),
            agree=strategy.replicas_agree,
            lockstep=lockstep,
        )
    for host in range(world_size):
        learners.replicas.model(host).load_state_dict(start)
    network = Network(describe(hosts=world_size, rate="100mbit", slow=slow), latency_s=0.001)
    model = ComputeModel.of(COMPUTE_S, bucket_bytes=BUCKET_BYTES)
    session = Session(network, strategy, learners, model)
    session.num_steps = STEPS
    for epoch in range(learners.setup.config.epochs):
        if epoch:
            learners.begin(epoch)
        session.epoch()
        if learners.lockstep is not None:
            learners.lockstep.check()
    assert all(session.stats(host).steps == STEPS for host in session.hosts)
    models = [learners.replicas.model(host) for host in session.hosts]
    return [[p.detach().clone() for p in model.parameters()] for model in models], session
