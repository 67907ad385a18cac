"""The training loop of all recipes: plain PyTorch and one line that joins workers, as in anybody's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire.data import Shards, ShuffleRing, Streams
from thinwire.events import Evaluated, Record, RunEnded, Summary
from thinwire.recipes.base import Carried, Data, Plan, Recipe, Training
from thinwire.recipes.config import RunConfig
from thinwire.recipes.devices import choose_device
from thinwire.recipes.held import hold, ring_of
from thinwire.recipes.joined import Join, Joined, Peers, caution_of, join_by
from thinwire.recipes.keep import Carry, Course, keep
from thinwire.recipes.meter import Meter
from thinwire.recipes.profile import profiling

Emit = Callable[[Record], object]
TEST_BATCH_SIZE = 100
TEST_STREAMS = 16
"""Rows that a test text is read in, by all workers together."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Which worker this is, as the launcher says."""

    rank: int
    world_size: int
    local_rank: int = 0
    """Among the workers of this host."""
    checkpoints: Path | None = None
    """The folder for them, the same on all workers."""


@dataclass(frozen=True, slots=True)
class Result:
    """How the model does on the test data."""

    value: float
    loss: float


def train(
    recipe: Recipe,
    config: RunConfig,
    worker: Worker,
    emit: Emit,
    on_error: AbstractContextManager[object] | None = None,
    trace: Path | None = None,
    join: Join | None = None,
) -> None:
    """Train as one of the workers; `emit` is told how it goes, `on_error` sees an error before peers do,
    `trace` is where a few steps are written to as a Chrome trace, and `join` is how workers are joined, if
    not by the strategy of `config`."""
    torch.manual_seed(config.seed)
    device = choose_device(config.device, worker.local_rank)
    training = recipe.training()
    with device:  # the data is small: its tensors are made where they are used
        data = training.data(config.data_folder)
    shards: Shards | Streams | ShuffleRing = shards_of(data, config, worker)
    if config.shuffle != "dealt":
        data = hold(data, worker.rank, worker.world_size)
    num_steps = config.epochs * shards.num_batches(config.batch_size)
    plan = Plan(world_size=worker.world_size, batch_size=config.batch_size, num_steps=num_steps)
    caution = caution_of(config, num_steps, tell=worker.rank == 0 and join is None)
    model = training.model().to(device)
    optimizer = training.optimizer(model, plan)
    course = Course(optimizer, training.schedule, plan)
    with (
        (join or join_by(config))(model, optimizer) as joined,
        on_error or nullcontext(),
        profiling(trace, plan.num_steps, device) as step_done,
    ):
        seed_apart(config.seed, worker.rank)
        peers = joined.peers
        if config.shuffle == "ring":
            shards = ring_of(data, config, peers)
        meter = Meter(
            rank=worker.rank, plan=plan, num_epochs=config.epochs, stats=lambda: peers.stats, emit=emit
        )
        result = Result(0.0, 0.0)
        carry, every = Carry(device), config.evaluate_every

        def judge(epoch: int) -> Result:
            meter.pause()
            result = evaluate(model, training, data, joined, device)
            if worker.rank == 0:
                emit(_evaluated(recipe, meter, epoch, result))
            joined.model.train()
            meter.start()
            return result

        with keep(config, worker.checkpoints, peers, model, course, shards, meter, carry) as checkpoints:
            for epoch in range(shards.epoch + 1, config.epochs + 1):
                if shards.epoch != epoch - 1:
                    shards.set_epoch(epoch - 1)
                    carry.state = None
                joined.model.train()
                meter.start()
                for batch in shards.batches(config.batch_size):
                    inputs, targets = data.train.take(batch)
                    joined.optimizer.zero_grad()
                    outputs, carry.state = training.forward(joined.model, inputs.to(device), carry.state)
                    loss = training.loss(outputs, targets.to(device))
                    value = loss.item()
                    meter.check(value, epoch)
                    loss.backward()
                    if training.clip_norm is not None:
                        peers.clip_grad_norm_(training.clip_norm)
                    joined.optimizer.step()
                    course.step()
                    meter.stepped(value, len(batch), epoch)
                    checkpoints.stepped()
                    step_done()
                    if every and meter.step % every == 0:
                        result = judge(epoch)
                if not every or meter.step % every:
                    result = judge(epoch)
        ended = meter.ended()
        summary = replace(_summary(recipe, config, result, ended, peers), caution=caution)
    emit(ended)
    if worker.rank == 0:
        emit(summary)


def seed_apart(seed: int, rank: int) -> None:
    """From here on workers draw different numbers (dropout, crops), still the same in every run."""
    torch.manual_seed(seed_of(seed, rank))


def seed_of(seed: int, rank: int) -> int:
    """One worker's own seed."""
    return int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])


def shards_of(data: Data, config: RunConfig, worker: Worker) -> Shards | Streams:
    """This worker's part of the training data, in the order the data asks for."""
    count, rank, world_size = len(data.train), worker.rank, worker.world_size
    if data.order == "streams":
        return Streams(num_samples=count, rank=rank, world_size=world_size)
    if config.shuffle != "dealt":  # the worker's own part, shuffled by itself
        return Shards(num_samples=count // world_size, seed=config.seed)
    return Shards(num_samples=count, rank=rank, world_size=world_size, seed=config.seed)


@torch.no_grad()
def evaluate(
    model: nn.Module, training: Training, data: Data, joined: Joined, device: torch.device
) -> Result:
    """The metric and the loss on the test data, each worker going through its part of it."""
    peers = joined.peers
    with nullcontext() if joined.replicas_agree else peers.averaged():
        model.eval()
        loss_sum = score_sum = 0.0
        count = 0
        carried: Carried = None
        for batch in batches_of_test(data, peers.rank, peers.world_size):
            inputs, targets = data.test.take(batch)
            outputs, carried = training.forward(model, inputs.to(device), carried)
            loss_sum += training.loss(outputs, targets.to(device)).item() * len(batch)
            score_sum += training.score(outputs, targets.to(device)).item()
            count += len(batch)
    loss_total, score_total, total = peers.sum([loss_sum, score_sum, count])
    return Result(training.metric(score_total / total), loss_total / total)


def batches_of_test(data: Data, rank: int, world_size: int) -> Iterator[NDArray[np.int64]]:
    """One worker's part of the test data. Of streams a few samples at the end may be left out; how many
    does not depend on the number of workers as long as it divides `TEST_STREAMS`."""
    if data.order == "streams":
        streams = Streams(num_samples=len(data.test), rank=rank, world_size=world_size)
        yield from streams.batches(max(1, min(TEST_STREAMS, len(data.test)) // world_size))
        return
    mine = np.arange(rank, len(data.test), world_size)
    for start in range(0, len(mine), TEST_BATCH_SIZE):
        yield mine[start : start + TEST_BATCH_SIZE]


def _evaluated(recipe: Recipe, meter: Meter, epoch: int, result: Result) -> Evaluated:
    return Evaluated(
        step=meter.step,
        epoch=epoch,
        metric=recipe.target.metric,
        value=result.value,
        loss=result.loss,
        train_s=meter.train_s,
    )


def _summary(recipe: Recipe, config: RunConfig, result: Result, ended: RunEnded, peers: Peers) -> Summary:
    train_s = max(ended.train_s, 1e-9)
    told = peers.stats.instruments
    sent, messages, seconds, speed, exposed, *instruments = peers.sum(
        [
            *(ended.sent_bytes, ended.messages, train_s, ended.samples / train_s, ended.exposed_s / train_s),
            *told.values(),
        ]
    )
    return Summary(
        recipe=recipe.name,
        strategy=config.strategy,
        settings=config.settings,
        workers=peers.world_size,
        epochs=config.epochs,
        steps=ended.steps,
        metric=recipe.target.metric,
        value=result.value,
        target=recipe.target.value,
        reached=recipe.target.reached_by(result.value),
        loss=result.loss,
        train_s=seconds / peers.world_size,
        samples_per_s=speed,
        sent_bytes=int(sent),
        sent_bytes_per_step=sent / peers.world_size / ended.steps,
        messages=int(messages),
        exposed_share=exposed / peers.world_size,
        instruments={k: v / peers.world_size for k, v in zip(told, instruments, strict=True)},
    )
