"""What a run reports: progress of each worker, evaluations on the test data, and the summary.

Evaluation is left out of every number that is counted while training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire.data import Streams
from thinwire.engine.core import Stats
from thinwire.errors import NumericError
from thinwire.events import Evaluated, Progress, Record, RunEnded, Summary
from thinwire.recipes.base import Carried, Data, TrainingPlan
from thinwire.recipes.setup import RunSetup

EVERY_S = 0.5
"""Seconds between two progress records of a worker."""
TEST_BATCH_SIZE = 100
TEST_STREAMS = 16
"""Rows that a test text is read in, by all workers together."""
SumOverProcesses = Callable[[list[float]], list[float]]
"""Sums numbers over all processes of the run; `list` where one process holds all workers."""
_COUNTED = ("rounds", "sent_bytes", "received_bytes", "messages", "exposed_s")
"""Stats of a link that `RunEnded` totals, under the same names."""


def check_loss(loss: float, where: str, when: str = "") -> None:
    """Raise NumericError if the loss is not finite."""
    if not math.isfinite(loss):
        raise NumericError(
            f"{where}: the loss is {loss}{when}",
            hint="lower the learning rate, clip gradients, and look for NaN or huge values in the data",
        )


@dataclass(slots=True, kw_only=True)
class ProgressMeter:
    """Counts one worker's training between `start` and `pause`."""

    rank: int
    plan: TrainingPlan
    num_epochs: int
    stats: Callable[[], Stats]
    emit: Callable[[Record], object]
    clock: Callable[[], float] = time.perf_counter
    step: int = 0
    samples: int = 0
    totals: dict[str, Any] = field(default_factory=dict)
    """Training seconds and the link's stats, counted while training."""
    _offsets: dict[str, float] = field(default_factory=dict)
    """Totals minus readings: constant while training."""
    _window: tuple[float, int] = (0.0, 0)
    """Training seconds and samples when the last progress record was written."""
    _losses: list[float] = field(default_factory=list)

    @property
    def train_s(self) -> float:
        return float(self.totals.get("train_s", 0.0))

    def start(self) -> None:
        self._offsets = {name: self.totals.get(name, 0) - value for name, value in self._read().items()}

    def pause(self) -> None:
        self.totals = {name: self._offsets[name] + value for name, value in self._read().items()}

    def stepped(self, loss: float, num_samples: int, epoch: int) -> None:
        """Count a step that is done; report from time to time, and after the last step."""
        self.step += 1
        self.samples += num_samples
        self._losses.append(loss)
        self.pause()  # brings the totals up to date; the offsets stay valid
        window_s, window_samples = self._window
        if self.train_s - window_s < EVERY_S and self.step < self.plan.num_steps:
            return
        # the loss is averaged over the steps since the last record: that of one batch is too noisy to plot
        self.emit(
            Progress(
                step=self.step,
                num_steps=self.plan.num_steps,
                epoch=epoch,
                num_epochs=self.num_epochs,
                loss=sum(self._losses) / len(self._losses),
                samples_per_s=(self.samples - window_samples) / max(self.train_s - window_s, 1e-9),
                sent_bytes=self.totals["sent_bytes"],
                exposed_s=self.totals["exposed_s"],
                train_s=self.train_s,
                instruments=dict(self.stats().instruments),
            )
        )
        self._window = self.train_s, self.samples
        self._losses.clear()

    def ended(self) -> RunEnded:
        return RunEnded(steps=self.step, samples=self.samples, **self.totals)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts since the start of training, across interruptions."""
        return {"step": self.step, "samples": self.samples, "totals": dict(self.totals)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.step, self.samples, self.totals = saved["step"], saved["samples"], dict(saved["totals"])
        self._window = self.train_s, self.samples

    def resize(self, saved: Sequence[dict[str, Any]]) -> None:
        """Take over a share of what another number of workers has counted, so that no total is lost."""
        share = saved[self.rank :: self.plan.world_size]  # empty for a rank beyond the old world size
        totals = {name: sum(each["totals"][name] for each in share) for name in saved[0]["totals"]}
        # all of them trained at the same time: seconds are averaged where the other totals are summed
        totals["train_s"] = sum(each["totals"]["train_s"] for each in saved) / len(saved)
        samples = sum(each["samples"] for each in share)
        self.load_state_dict({"step": saved[0]["step"], "samples": samples, "totals": totals})

    def _read(self) -> dict[str, Any]:
        stats = self.stats()  # once: in a simulation of small models this is a good part of a step
        return {"train_s": self.clock(), **{name: getattr(stats, name) for name in _COUNTED}}


@torch.no_grad()
def evaluate(
    setup: RunSetup,
    models: Mapping[int, nn.Module],
    num_parts: int,
    *,
    step: int,
    epoch: int,
    train_s: float,
    distance: float | None = None,
    all_reduce: SumOverProcesses = list,
) -> Evaluated:
    """Compute metric and loss on the test data, cut into `num_parts` parts of which each model evaluates one.

    `models` are those of this process, by the number of their part. They are left in training mode.
    """
    training, test = setup.training, setup.data.test
    loss_sum = score_sum = count = 0.0
    for part, model in models.items():
        model.eval()
        carried: Carried = None
        for batch in _test_batches(setup.data, part, num_parts):
            inputs, targets = setup.take(test, batch)
            outputs, carried = training.forward(model, inputs, carried)
            loss_sum += training.loss(outputs, targets).item() * len(batch)
            score_sum += training.score(outputs, targets).item()
            count += len(batch)
        model.train()
    # parts differ in size by a sample, so sums are exchanged, not means
    loss_sum, score_sum, count = all_reduce([loss_sum, score_sum, count])
    return Evaluated(
        step=step,
        epoch=epoch,
        metric=setup.recipe.target.metric,
        value=training.metric(score_sum / count),
        loss=loss_sum / count,
        train_s=train_s,
        distance=distance,
    )


def _test_batches(data: Data, rank: int, world_size: int) -> Iterator[NDArray[np.int64]]:
    """Yield one worker's part of the test data. A few samples at the end of a text may be left out; how many
    does not depend on the number of workers as long as it divides `TEST_STREAMS`."""
    if data.order == "streams":
        streams = Streams(num_samples=len(data.test), rank=rank, world_size=world_size)
        yield from streams.batches(max(1, min(TEST_STREAMS, len(data.test)) // world_size))
        return
    for start in range(rank, len(data.test), TEST_BATCH_SIZE * world_size):
        end = min(start + TEST_BATCH_SIZE * world_size, len(data.test))
        yield np.arange(start, end, world_size)


def summarize(
    setup: RunSetup,
    evaluated: Evaluated,
    ended: Sequence[RunEnded],
    instruments: Sequence[Mapping[str, float]],
    advice: str,
    all_reduce: SumOverProcesses = list,
) -> Summary:
    """Sum up a run from its last evaluation and from the totals and instruments of this process's workers."""
    config, target, worker_s = setup.config, setup.recipe.target, [max(each.train_s, 1e-9) for each in ended]
    per_worker = [
        [1.0, each.sent_bytes, each.messages, train_s, each.samples / train_s, each.exposed_s / train_s]
        for each, train_s in zip(ended, worker_s, strict=True)
    ]
    # the leading 1.0 counts: a worker lost on the virtual clock has totals, but no instruments at the end
    read = [[1.0, *each.values()] for each in instruments]
    columns = [column for rows in (per_worker, read) for column in zip(*rows, strict=True)]
    totals = all_reduce([float(sum(column)) for column in columns])
    workers, sent_bytes, messages, train_s, samples_per_s, exposed_shares, num_read, *values = totals
    steps = max(each.steps for each in ended)
    return Summary(
        recipe=setup.recipe.name,
        strategy=config.strategy,
        settings=config.settings,
        workers=int(workers),
        epochs=config.epochs,
        steps=steps,
        metric=target.metric,
        value=evaluated.value,
        target=target.value,
        reached=evaluated.value is not None and target.reached_by(evaluated.value),
        loss=evaluated.loss,
        train_s=train_s / workers,
        samples_per_s=samples_per_s,
        sent_bytes=int(sent_bytes),
        sent_bytes_per_step=sent_bytes / workers / steps,
        messages=int(messages),
        exposed_share=exposed_shares / workers,
        instruments={name: v / num_read for name, v in zip(instruments[0], values, strict=True)},
        advice=advice,
    )
