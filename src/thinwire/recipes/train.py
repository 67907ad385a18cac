"""The training loop of all recipes: plain PyTorch and one `attach`, as in anybody's own script."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from thinwire.data import Shards
from thinwire.engine.attach import attach
from thinwire.engine.link import Link
from thinwire.errors import PeerLost
from thinwire.events import Evaluated, Record, RunEnded, Summary
from thinwire.recipes.base import Plan, Recipe, Samples, Training
from thinwire.recipes.config import RunConfig
from thinwire.recipes.meter import Meter
from thinwire.strategies import registry as strategies
from thinwire.strategies.base import overrides

Emit = Callable[[Record], object]
TEST_BATCH_SIZE = 500


@dataclass(frozen=True, slots=True)
class Worker:
    """Which worker this is, as the launcher says."""

    rank: int
    world_size: int


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
) -> None:
    """Train as one of the workers; `emit` is told how it goes, `on_error` sees an error before peers do."""
    torch.manual_seed(config.seed)
    training = recipe.training()
    data = training.data(config.data_folder)
    shards = Shards(
        num_samples=len(data.train), rank=worker.rank, world_size=worker.world_size, seed=config.seed
    )
    plan = Plan(
        world_size=worker.world_size,
        batch_size=config.batch_size,
        num_steps=config.epochs * shards.num_batches(config.batch_size),
    )
    model = training.model()
    optimizer = training.optimizer(model, plan)
    schedule = training.schedule(optimizer, plan)
    strategy = strategies.build(config.strategy, config.settings)
    with attach(model, optimizer, strategy) as link, on_error or nullcontext():
        # from here on workers draw different numbers (dropout), still the same in every run
        torch.manual_seed(int(np.random.SeedSequence([config.seed, worker.rank]).generate_state(1)[0]))
        meter = Meter(
            rank=worker.rank, plan=plan, num_epochs=config.epochs, stats=lambda: link.stats, emit=emit
        )
        result = Result(0.0, 0.0)
        for epoch in range(1, config.epochs + 1):
            shards.set_epoch(epoch - 1)
            model.train()
            meter.start()
            for batch in shards.batches(config.batch_size):
                inputs, targets = data.train.take(batch)
                optimizer.zero_grad()
                loss = training.loss(model(inputs), targets)
                value = loss.item()
                meter.check(value, epoch)
                loss.backward()
                optimizer.step()
                schedule.step()
                meter.stepped(value, len(batch), epoch)
            meter.pause()
            result = evaluate(model, training, data.test, link)
            if worker.rank == 0:
                emit(_evaluated(recipe, meter, epoch, result))
        ended = meter.ended()
        summary = _summary(recipe, config, result, ended, link)
    emit(ended)
    if worker.rank == 0:
        emit(summary)


@torch.no_grad()
def evaluate(model: nn.Module, training: Training, samples: Samples, link: Link) -> Result:
    """The metric and the loss on all of `samples`, each worker going through its part of them."""
    talks = overrides(link.strategy, "reduce") or overrides(link.strategy, "mix")
    # replicas that differ are judged by their mean, which is what a user would keep
    differ = talks and not link.strategy.replicas_agree
    with link.averaged() if differ else nullcontext():
        model.eval()
        loss_sum = score_sum = 0.0
        mine = np.arange(link.rank, len(samples), link.world_size)
        for start in range(0, len(mine), TEST_BATCH_SIZE):
            batch = mine[start : start + TEST_BATCH_SIZE]
            inputs, targets = samples.take(batch)
            outputs = model(inputs)
            loss_sum += training.loss(outputs, targets).item() * len(batch)
            score_sum += training.score(outputs, targets).item()
    loss_total, score_total = sum_over_workers([loss_sum, score_sum], link)
    return Result(score_total / len(samples), loss_total / len(samples))


def sum_over_workers(values: list[float], link: Link) -> list[float]:
    """The sums of a few numbers over all workers, on torch's own group: not part of the traffic."""
    if link.world_size == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64)
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        raise PeerLost(f"worker {link.rank} lost a peer while evaluating: {error}") from error
    return [float(value) for value in total]


def _evaluated(recipe: Recipe, meter: Meter, epoch: int, result: Result) -> Evaluated:
    return Evaluated(
        step=meter.step,
        epoch=epoch,
        metric=recipe.target.metric,
        value=result.value,
        loss=result.loss,
        train_s=meter.train_s,
    )


def _summary(recipe: Recipe, config: RunConfig, result: Result, ended: RunEnded, link: Link) -> Summary:
    train_s = max(ended.train_s, 1e-9)
    sent, messages, seconds, speed, exposed = sum_over_workers(
        [ended.sent_bytes, ended.messages, train_s, ended.samples / train_s, ended.exposed_s / train_s], link
    )
    return Summary(
        recipe=recipe.name,
        strategy=config.strategy,
        settings=config.settings,
        workers=link.world_size,
        epochs=config.epochs,
        steps=ended.steps,
        metric=recipe.target.metric,
        value=result.value,
        target=recipe.target.value,
        reached=recipe.target.reached_by(result.value),
        loss=result.loss,
        train_s=seconds / link.world_size,
        samples_per_s=speed,
        sent_bytes=int(sent),
        sent_bytes_per_step=sent / link.world_size / ended.steps,
        messages=int(messages),
        exposed_share=exposed / link.world_size,
    )
