"""The training loop of all recipes: plain PyTorch and one line that attaches the workers; and its
checkpoints, which are resumed with any number of workers, and traces."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.profiler import schedule as profile_schedule

from thinwire.apoptosis.architecture import rebuild
from thinwire.apoptosis.shrinking import Shrinking
from thinwire.data import Shards, ShuffleRing, Streams
from thinwire.engine.checkpoint import Checkpoint
from thinwire.engine.link import Link
from thinwire.errors import UsageError
from thinwire.events import Evaluated, Record
from thinwire.recipes.base import Carried, Recipe
from thinwire.recipes.config import RunConfig
from thinwire.recipes.meter import ProgressMeter, check_loss, evaluate, summarize
from thinwire.recipes.setup import Attach, Attached, LRSchedule, RunSetup, attach_by, own_part, worker_seed

AnyShards = Shards | Streams | ShuffleRing
TRACED_STEPS = 5
STEPS_BEFORE_TRACE = 10
"""In a run that is long enough: the first steps are slower than the others."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """This worker's place in the run, as the launcher says."""

    rank: int
    world_size: int
    local_rank: int = 0
    """Rank among the workers of this host."""
    checkpoints: Path | None = None
    """The folder for checkpoints, the same on all workers."""


def train(
    recipe: Recipe,
    config: RunConfig,
    worker: WorkerContext,
    emit: Callable[[Record], object],
    on_error: AbstractContextManager[object] | None = None,
    trace: Path | None = None,
    attach: Attach | None = None,
) -> None:
    """Train as one of the workers.

    Args:
        emit: receives the events.
        on_error: sees an error before the other workers do.
        trace: file for a Chrome trace of a few steps.
        attach: how workers are attached, if not by the strategy of `config`.
    """
    setup = RunSetup.load(recipe, config, worker.local_rank)
    plan = setup.plan(worker.world_size)
    shards: AnyShards = setup.shards(worker.rank, worker.world_size)
    if config.shuffle != "dealt":
        setup = replace(setup, data=own_part(setup.data, worker.rank, worker.world_size))
    advice = setup.advice(plan.num_steps, log=False)  # attach says it
    model = setup.training.model().to(setup.device)
    if config.resume and config.apoptosis and worker.checkpoints is not None:
        rebuild(model, worker.checkpoints)
    schedule = LRSchedule(setup.training, model, plan)
    with (
        (attach or partial(attach_by, config, plan.num_steps))(model, schedule.optimizer) as attached,
        on_error or nullcontext(),
        _tracing(trace, plan.num_steps, setup.device) as trace_step,
    ):
        # only now: model initialisation must be the same on all workers, dropout and crops must not
        torch.manual_seed(worker_seed(config.seed, worker.rank))
        link = attached.link
        if config.shuffle == "ring":
            shards = setup.shuffle_ring(link)
        meter = ProgressMeter(
            rank=worker.rank, plan=plan, num_epochs=config.epochs, stats=lambda: link.stats, emit=emit
        )
        loop = _Loop(setup, model, attached, schedule, meter, shards)
        with loop.checkpoints(worker.checkpoints) as save_if_due:
            evaluated = loop.run((save_if_due, trace_step))
        ended = meter.ended()
        summary = summarize(setup, evaluated, [ended], [link.stats.instruments], advice, link.all_reduce)
    emit(ended)
    if worker.rank == 0:
        emit(summary)


@dataclass(slots=True)
class _Loop:
    """Epochs, steps and evaluations of one worker; a checkpoint keeps the state that its model carries."""

    setup: RunSetup
    model: nn.Module
    attached: Attached
    schedule: LRSchedule
    meter: ProgressMeter
    shards: AnyShards
    carried: Carried = None
    evaluated: Evaluated | None = None
    told: int = 0
    """Events of apoptosis that were emitted."""

    def run(self, after_step: Sequence[Callable[[], object]]) -> Evaluated:
        """Train all epochs that are left; return the last evaluation."""
        config, meter, shards = self.setup.config, self.meter, self.shards
        self.attached.model.train()
        for epoch in range(shards.epoch + 1, config.epochs + 1):
            if shards.epoch != epoch - 1:  # else a resumed run is in the middle of this epoch
                shards.set_epoch(epoch - 1)
                self.carried = None
            meter.start()
            for batch in shards.batches(config.batch_size):
                self._step(batch, epoch)
                for call in after_step:
                    call()
                if config.evaluate_every and meter.step % config.evaluate_every == 0:
                    self._evaluate(epoch)
            # not twice at one step; and a run resumed at its very end has not evaluated yet
            if self.evaluated is None or self.evaluated.step != meter.step:
                self._evaluate(epoch)
        assert self.evaluated is not None, "a run has at least one epoch"
        return self.evaluated

    def _step(self, batch: NDArray[np.int64], epoch: int) -> None:
        setup, attached, meter = self.setup, self.attached, self.meter
        inputs, targets = setup.take(setup.data.train, batch)
        attached.optimizer.zero_grad()
        loss, self.carried = setup.loss(attached.model, inputs, targets, self.carried)
        value = loss.item()
        # before a NaN reaches the other workers
        where = f"worker {meter.rank} on {socket.gethostname()}"
        check_loss(value, where, f" at step {meter.step + 1} (epoch {epoch})")
        loss.backward()
        if setup.training.clip_norm is not None:
            attached.link.clip_grad_norm_(setup.training.clip_norm)
        if isinstance(attached.link, Link):
            attached.link.observe(value)
        attached.optimizer.step()
        self._tell_shrinking()
        self.schedule.step()
        meter.stepped(value, len(batch), epoch)

    def _tell_shrinking(self) -> None:
        """Emit what apoptosis has done in this step, as rank 0 does for all."""
        companion = self.attached.link.companion if isinstance(self.attached.link, Link) else None
        if isinstance(companion, Shrinking) and self.meter.rank == 0:
            for event in companion.history[self.told :]:
                self.meter.emit(event)
            self.told = len(companion.history)

    def _evaluate(self, epoch: int) -> None:
        meter, link = self.meter, self.attached.link
        meter.pause()
        with nullcontext() if self.attached.replicas_agree else link.averaged():
            self.evaluated = evaluate(
                self.setup,
                {link.rank: self.model},
                link.world_size,
                step=meter.step,
                epoch=epoch,
                train_s=meter.train_s,
                all_reduce=link.all_reduce,
            )
        if link.rank == 0:
            meter.emit(self.evaluated)
        meter.start()

    # -- checkpoints --------------------------------------------------------------------------------

    @contextmanager
    def checkpoints(self, folder: Path | None) -> Iterator[Callable[[], None]]:
        """Resume from the newest checkpoint if asked for; save at the end, and when the function that is
        yielded and called after every step finds that it is time."""
        config, link, shards, meter = self.setup.config, self.attached.link, self.shards, self.meter
        if folder is None or not (config.save_every or config.resume):
            yield lambda: None
            return
        if not isinstance(link, Link):
            raise UsageError("checkpoints are saved through a link; this run was attached by another system")
        settings = {"recipe": config.recipe, "seed": config.seed, "samples": shards.num_samples}
        settings |= {"epochs": config.epochs, "batch size": config.batch_size, "shuffle": config.shuffle}
        parts: dict[str, Any] = {"model": self.model, "optimizer": self.schedule.optimizer}
        parts |= {"schedule": self.schedule, "shards": shards, "meter": meter, "carry": self}
        with Checkpoint(folder, link=link, settings=settings, **parts) as checkpoint:
            saved = checkpoint.load() if config.resume else None
            if saved is not None:
                self._replan(saved.world_size)
            newest = 0 if saved is None else saved.step

            def save() -> None:
                nonlocal newest
                if meter.step != newest:
                    checkpoint.save(meter.step)
                    newest = meter.step

            yield lambda: save() if config.save_every and meter.step % config.save_every == 0 else None
            save()

    def _replan(self, saved_world_size: int) -> None:
        """Count the steps that are left for this number of workers; the schedule must end with the run."""
        plan, shards = self.meter.plan, self.shards
        left = self.setup.steps_left(plan, shards.epoch, shards.num_batches(plan.batch_size))
        self.meter.plan = replace(plan, num_steps=self.meter.step + left)
        if saved_world_size != plan.world_size:
            self.schedule.restart(plan.num_steps - left)

    def state_dict(self) -> dict[str, Any]:
        return {str(i): tensor for i, tensor in enumerate(self.carried or ())}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.carried = tuple(saved[str(i)].to(self.setup.device) for i in range(len(saved))) or None

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        self.carried = None  # with another number of workers, each has other rows of text


@contextmanager
def _tracing(path: Path | None, num_steps: int, device: torch.device) -> Iterator[Callable[[], object]]:
    """Yield a function to call after every step; a few steps are traced to `path` (None: none are)."""
    if path is None:
        yield lambda: None
        return

    def write(profiler: Any) -> None:
        profiler.export_chrome_trace(str(path))
        content = json.loads(path.read_text(encoding="utf-8"))
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        events = [
            e for e in content["traceEvents"] if e.get("name") != "thread_name" or e.get("tid") not in names
        ]
        content["traceEvents"] = events + [
            {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": tid, "args": {"name": name}}
            for tid, name in names.items()
        ]
        path.write_text(json.dumps(content), encoding="utf-8")

    # the profiler needs one step to warm up, which it records and throws away
    active = max(1, min(TRACED_STEPS, num_steps - 1))
    wait = max(0, min(STEPS_BEFORE_TRACE, num_steps - active - 1))
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    # by default the profiler sees only its own thread, and communication is in others
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(
        activities=[ProfilerActivity.CPU, *gpu],
        schedule=profile_schedule(wait=wait, warmup=1, active=active, repeat=1),
        on_trace_ready=write,
        experimental_config=every_thread,
    ) as profiler:
        yield profiler.step
