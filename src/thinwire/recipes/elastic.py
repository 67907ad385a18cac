"""A recipe trained in an elastic world: workers may die, come back and join.

The training loop of `train.py`, with the samples dealt by the link. When the workers have changed, learning
rate and schedule follow the plan for the new number of workers, from the same place in the samples.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from thinwire.elastic.sampler import ElasticSampler
from thinwire.engine.link import Link
from thinwire.errors import SettingError
from thinwire.events import Evaluated, Record
from thinwire.recipes.base import Recipe
from thinwire.recipes.config import RunConfig
from thinwire.recipes.meter import ProgressMeter, check_loss, evaluate, summarize
from thinwire.recipes.setup import Attached, LRSchedule, RunSetup, attach_by, worker_seed

_log = logging.getLogger("thinwire")


def train_elastic(
    recipe: Recipe,
    config: RunConfig,
    number: int,
    emit: Callable[[Record], object],
    on_error: AbstractContextManager[object] | None = None,
    *,
    local_rank: int = 0,
) -> None:
    """Train as one of the workers, or join those that train.

    Args:
        number: of this worker, which it keeps while its rank changes.
        emit: receives the events.
        on_error: sees an error before the other workers do.
    """
    setup = RunSetup.load(recipe, config, local_rank)
    if setup.data.order == "streams":
        raise SettingError(
            f"elastic training deals samples out anew when workers change, and {recipe.name} reads its text "
            "in streams",
            hint="leave --elastic out, or train text-transformer",
        )
    plan = setup.plan(config.workers)  # also on one that joins: it is to have the settings of the others
    model = setup.training.model().to(setup.device)
    schedule = LRSchedule(setup.training, model, plan)
    with attach_by(config, plan.num_steps, model, schedule.optimizer) as attached, on_error or nullcontext():
        torch.manual_seed(worker_seed(config.seed, number))
        link = attached.link
        assert isinstance(link, Link)
        _log.warning("worker %d of %d listens on %s", link.rank, link.world_size, link.address)
        advice = setup.advice(plan.num_steps, log=link.rank == 0)
        sampler = link.sampler(len(setup.data.train), batch_size=config.batch_size, seed=config.seed)
        meter = ProgressMeter(
            rank=number, plan=plan, num_epochs=config.epochs, stats=lambda: link.stats, emit=emit
        )
        loop = _ElasticTraining(setup, model, attached, link, sampler, schedule, meter)
        evaluated = loop.run()
        ended = meter.ended()
        summary = summarize(setup, evaluated, [ended], [link.stats.instruments], advice, link.all_reduce)
        leads = link.rank == 0
    emit(ended)
    if leads:
        emit(summary)


class _Incomplete(Exception):
    """A worker was lost before it had told its part of an evaluation."""


@dataclass(slots=True)
class _ElasticTraining:
    """Epochs, steps and evaluations of one worker."""

    setup: RunSetup
    model: nn.Module
    attached: Attached
    link: Link
    sampler: ElasticSampler
    schedule: LRSchedule
    meter: ProgressMeter
    generation: int = 1
    """The one that the learning rate is meant for."""

    def run(self) -> Evaluated:
        """Train all epochs that are left; return the last evaluation."""
        config, meter, link = self.setup.config, self.meter, self.link
        # of one that has joined after the last step
        evaluated = Evaluated(
            step=link.steps,
            epoch=config.epochs,
            metric=self.setup.recipe.target.metric,
            value=None,
            loss=None,
            train_s=0.0,
        )
        self.attached.model.train()
        for epoch in link.epochs(config.epochs):
            meter.start()
            for step in link.each_step(self.sampler):
                with step as batch:
                    self._step(batch, epoch + 1)
            meter.pause()
            evaluated = self._evaluate(epoch + 1)
            if link.rank == 0:
                meter.emit(evaluated)
        return evaluated

    def _step(self, batch: Sequence[int], epoch: int) -> None:
        setup, attached, meter, link = self.setup, self.attached, self.meter, self.link
        if link.generation != self.generation:
            self._replan()
        inputs, targets = setup.take(setup.data.train, np.asarray(batch))
        attached.optimizer.zero_grad()
        loss, _ = setup.loss(attached.model, inputs, targets, None)
        value = loss.item()
        check_loss(value, f"worker {meter.rank} on {socket.gethostname()}", f" at step {link.steps + 1}")
        loss.backward()
        if setup.training.clip_norm is not None:
            link.clip_grad_norm_(setup.training.clip_norm)
        attached.optimizer.step()
        self.schedule.step()
        meter.stepped(value, len(batch), epoch)

    def _replan(self) -> None:
        """Take the learning rate that the present number of workers has at this place in the samples."""
        link, setup, sampler = self.link, self.setup, self.sampler
        self.generation = link.generation
        plan = setup.plan(link.world_size)
        left = setup.steps_left(plan, sampler.epoch, len(sampler))
        self.schedule.follow_plan(setup.training, self.model, plan, step=max(0, plan.num_steps - left))
        self.meter.step = link.steps
        self.meter.plan = replace(plan, num_steps=link.steps + left)

    def _evaluate(self, epoch: int) -> Evaluated:
        """Evaluate the model; again if a worker was lost meanwhile, since each has a part of the data."""
        link, num_samples = self.link, len(self.setup.data.test)

        def add_up(values: list[float]) -> list[float]:
            totals = link.all_reduce(values)
            if round(totals[-1]) != num_samples:  # the same number on all workers
                raise _Incomplete
            return totals

        with nullcontext() if self.attached.replicas_agree else link.averaged():
            while True:
                try:
                    return evaluate(
                        self.setup,
                        {link.rank: self.model},
                        link.world_size,
                        step=link.steps,
                        epoch=epoch,
                        train_s=self.meter.train_s,
                        all_reduce=add_up,
                    )
                except _Incomplete:
                    continue
