"""The trainings of `benchmarks.apoptosis`: ways to make a network smaller."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import thinwire as tw
from benchmarks.apoptosis_problems import PROBLEMS, auc
from benchmarks.common import note
from thinwire.apoptosis.settings import Mode
from thinwire.recipes.samples import TensorSamples

MODES: dict[str, Mode] = {"adaptive": "adaptive", "aggressive": "aggressive", "lasso": "conservative"}
"""Modes of the methods that are apoptosis."""
NUM_CHECKS = 64
"""Checks of apoptosis in the whole run."""
WHOLE = 1 << 30
"""Bytes: one bucket for all gradients. There is nobody to send to, and a GPU is kept waiting by many small
operations."""
TIMED_STEPS = 40
"""Steps of each network that are timed, by turns, once training is over."""


@dataclass
class Run:
    """One training, as it went."""

    problem: str
    method: str
    seed: int
    curve: list[dict[str, float]] = field(default_factory=list)
    """Twice per epoch: training seconds, validation metric, parameters, and bytes that one worker of
    many would have sent."""
    events: list[dict[str, Any]] = field(default_factory=list)
    event_s: float = 0.0
    steps: int = 0
    parameters: tuple[int, int] = (0, 0)
    final: float = 0.0
    """The metric on the test data, looked at once."""
    interval: tuple[float, float] | None = None
    """Its bootstrap interval, 95 %, where it is an AUC."""
    unfinished: str = ""
    """Why it ended before its last step; empty: it did not."""
    failed: bool = False
    """It ended with an error."""
    step_s: tuple[float, float] | None = None
    """On a GPU: a step of the network as it was built, and of what is left, without a link; timed by turns,
    so that other work on the GPU slows both."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Which training is to be made."""

    problem: str
    method: str
    seed: int
    epochs: int | None = None
    """None: those of the problem."""
    samples: int | None = None
    """Use only so many, of each part of the data."""
    goal: int = 0
    """Parameters that torch-pruning shall leave."""
    bf16: bool = False
    """Compute in bf16 where torch's autocast does, with images in the order of channels_last."""
    ends_at: float | None = None
    """Of `time.time()`: stop after the last epoch that is expected to end before it."""


def batches(count: int, size: int, seed: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    order = np.random.default_rng(seed).permutation(count)
    for start in range(0, count - size + 1, size):
        yield order[start : start + size]


class Trainer:
    """A network, its optimizer and one of the methods."""

    def __init__(self, work: Work, device: torch.device, steps: int) -> None:
        problem, method = PROBLEMS[work.problem], work.method
        self.problem, self.method, self.device, self.bf16 = problem, method, device, work.bf16
        self.model = problem.model().to(device)
        self.size = count(self.model)
        """Parameters that it has now."""
        self.optimizer = problem.optimizer(self.model)
        self.steps, self.schedule = steps, self._schedule(steps)
        self.every = max(1, steps // NUM_CHECKS)
        settings = tw.Apoptosis(every=self.every).within(steps)
        self.removals = [settings.first * 2**n for n in range(6) if settings.first * 2**n <= steps * 3 // 4]
        """Steps at which apoptosis removes neurons, unless the loss stands."""
        self.goal, self.event_s, self.done = work.goal, 0.0, 0
        self.link: tw.Link | None = None
        self.companion: Any = None
        if method in ("none", *MODES):
            self.link = tw.attach(
                self.model,
                self.optimizer,
                tw.AllReduce(),
                num_steps=steps,
                bucket_bytes=WHOLE if device.type == "cuda" else None,
                apoptosis=self._settings(MODES.get(method)),
            )
            self.companion = self.link.companion

    def _settings(self, mode: Mode | None) -> tw.Apoptosis | None:
        if mode is None:
            return None
        strength = self.problem.lasso if self.method == "lasso" else 0.0
        return tw.Apoptosis(mode=mode, every=self.every, lasso=strength)

    def _schedule(self, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
        up = max(1, steps // 20)
        return torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda at: min((at + 1) / up, max(0.0, (steps - at) / (steps - up)))
        )

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.problem.loss(self.model(inputs), targets)
        loss.backward()
        if self.companion is not None and self.link is not None:
            self.link.observe(loss)
        left = self.companion.settings.steps_to_next(self.done + 1) if self.companion is not None else 2
        began_s = _now(self.device) if left < 2 else 0.0  # at a check, and one step before it
        self.optimizer.step()
        if left < 2:
            self.event_s += (_now(self.device) - began_s) * (1 if left == 0 else -1)
            self.size = count(self.model)
        self.schedule.step()
        self.done += 1
        if self.method == "torch-pruning" and self.done in self.removals:
            self._prune(inputs)

    def leave(self) -> None:
        if self.link is not None:
            self.link.detach()

    def events(self) -> list[dict[str, Any]]:
        """What apoptosis has removed, and when."""
        return [
            {
                "step": event.step,
                "widths": dict(event.widths),
                "before": dict(event.before),
                "parameters": event.num_parameters,
                "causes": dict(event.causes),
                "seconds": event.seconds,
            }
            for event in (self.companion.history if self.companion else ())
        ]

    def _prune(self, inputs: Tensor) -> None:
        """A step of iterative magnitude pruning, in equal parts down to the goal."""
        import torch_pruning as tp

        began_s, left = _now(self.device), sum(step > self.done for step in self.removals)
        size = count(self.model)
        aim = self.goal * (size / self.goal) ** (left / (left + 1))
        outputs = [m for m in self.model.modules() if isinstance(m, nn.Linear)][-1]
        for ratio in np.linspace(0.02, 0.9, 45):  # parameters fall faster than neurons
            trial = tw.apoptosis.export(self.model).to(self.device)
            last = [m for m in trial.modules() if isinstance(m, nn.Linear)][-1]
            _pruner(tp, trial, last, inputs, float(ratio)).step()
            if count(trial) <= aim:
                _pruner(tp, self.model, outputs, inputs, float(ratio)).step()
                break
        self.model.train()
        rates = self.schedule.state_dict()
        self.optimizer = self.problem.optimizer(self.model)
        self.schedule = self._schedule(self.steps)
        self.schedule.load_state_dict(rates)
        self.size = count(self.model)
        self.event_s += _now(self.device) - began_s


def _pruner(tp: Any, model: nn.Module, outputs: nn.Module, inputs: Tensor, ratio: float) -> Any:
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # its graph is autograd's
    return tp.pruner.MagnitudePruner(
        model,
        inputs[:2],
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=ratio,
        global_pruning=False,
        round_to=None,
        ignored_layers=[outputs],
    )


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def load(name: str, folder: Path, device: torch.device) -> tuple[TensorSamples, TensorSamples, TensorSamples]:
    """Training, validation and test samples of a problem, the same for all seeds."""
    problem = PROBLEMS[name]
    folder = folder / "MNIST" if name.startswith("mnist") and (folder / "MNIST").exists() else folder
    with device:
        data = problem.data(folder)
    train, test = data.train, data.test
    assert isinstance(train, TensorSamples)
    assert isinstance(test, TensorSamples)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(train))).to(device)
    mine, held = order[: -problem.held_out], order[-problem.held_out :]
    return (
        replace(train, inputs=train.inputs[mine], targets=train.targets[mine]),
        replace(test, inputs=train.inputs[held], targets=train.targets[held]),
        test,
    )


def train(work: Work, folder: Path, device: torch.device) -> Run:
    """One training from its beginning to its end."""
    problem, seed = PROBLEMS[work.problem], work.seed
    run = Run(work.problem, work.method, seed)
    samples, validation, test = (
        replace(each, inputs=each.inputs[: work.samples], targets=each.targets[: work.samples])
        for each in load(work.problem, folder, device)
    )
    length = len(samples)
    epochs, per_epoch = work.epochs or problem.epochs, length // problem.batch
    warm_up(work, samples, device)
    torch.manual_seed(seed)
    trainer = Trainer(work, device, per_epoch * epochs)
    full = trainer.size
    try:
        _train_epochs(work, trainer, run, samples, validation, length)
        trainer.leave()
        scores, targets = predict(trainer.model, test, bf16=work.bf16)
        run.final = problem.metric(scores, targets)
        run.interval = bootstrap(scores, targets) if problem.metric is auc else None
        if device.type == "cuda":
            run.step_s = time_steps(work, trainer.model, samples, device)
    except Exception:  # noqa: BLE001 (what has been measured until here is written)
        run.unfinished, run.failed = traceback.format_exc(), True
        note(f"{work.problem} {work.method} seed {seed}: {run.unfinished}")
    run.parameters = (full, count(trainer.model))
    run.steps = trainer.done
    run.event_s, run.events = trainer.event_s, trainer.events()
    return run


def _train_epochs(
    work: Work, trainer: Trainer, run: Run, samples: TensorSamples, validation: TensorSamples, length: int
) -> None:
    """All epochs, or those that end before the deadline; what is measured goes into `run`."""
    problem, device = trainer.problem, trainer.device
    per_epoch = length // problem.batch
    epochs = trainer.steps // per_epoch
    seconds, sent = 0.0, 0.0
    began_s, began_at = _now(device), time.time()
    for epoch in range(epochs):
        given = feed(work, samples, batches(length, problem.batch, 1000 * work.seed + epoch))
        for number, (inputs, targets) in enumerate(given, start=1):
            sent += 8.0 * trainer.size  # all-reduce: each number leaves a worker twice, nearly
            trainer.step(inputs, targets)
            if number in (per_epoch // 2, per_epoch):
                seconds += _now(device) - began_s
                point = {"epoch": epoch + number / per_epoch, "seconds": seconds}
                point["metric"] = problem.metric(*predict(trainer.model, validation, bf16=work.bf16))
                run.curve.append({**point, "parameters": trainer.size, "sent_bytes": sent})
                began_s = _now(device)
        note(f"{work.problem} {work.method} seed {work.seed}: {json.dumps(run.curve[-1])}")
        one_more_s = (time.time() - began_at) / (epoch + 1)
        if work.ends_at is not None and epoch + 1 < epochs and time.time() + one_more_s > work.ends_at:
            run.unfinished = f"its time was up after {epoch + 1} of {epochs} epochs"
            return


def feed(
    work: Work, samples: TensorSamples, chosen: Iterable[np.ndarray[Any, np.dtype[np.int64]]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch."""
    if PROBLEMS[work.problem].by_epoch:
        whole = list(chosen)
        inputs, targets = samples.take(np.concatenate(whole))
        if work.bf16:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        size = len(whole[0])
        yield from zip(inputs.split(size), targets.split(size), strict=True)
        return
    for each in chosen:
        inputs, targets = samples.take(each)
        yield inputs.contiguous(memory_format=torch.channels_last) if work.bf16 else inputs, targets


def warm_up(work: Work, samples: TensorSamples, device: torch.device) -> None:
    """Have libraries loaded and memory taken before anything is timed: the first training pays for it."""
    problem = PROBLEMS[work.problem]
    step = plain_step(work, problem.model().to(device), samples)
    for _ in range(3):
        step()


def plain_step(work: Work, model: nn.Module, samples: TensorSamples) -> Callable[[], None]:
    """A step on always the same batch, without a link."""
    problem = PROBLEMS[work.problem]
    optimizer, device = problem.optimizer(model), next(model.parameters()).device
    ((inputs, targets),) = feed(work, samples, [np.arange(problem.batch)])

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=work.bf16):
            loss = problem.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def time_steps(
    work: Work, model: nn.Module, samples: TensorSamples, device: torch.device
) -> tuple[float, float]:
    """Median seconds of a step of the network as it was built, and of `model`; it trains both."""
    steps = [
        plain_step(work, each, samples)
        for each in (PROBLEMS[work.problem].model().to(device), tw.apoptosis.export(model).to(device).train())
    ]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(TIMED_STEPS + 5):
        for step, own in zip(steps, times, strict=True):
            began_s = _now(device)
            step()
            if turn >= 5:  # the first ones choose kernels and take memory
                own.append(_now(device) - began_s)
    return float(np.median(times[0])), float(np.median(times[1]))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


@torch.no_grad()
def predict(model: nn.Module, data: TensorSamples, *, bf16: bool = False) -> tuple[Tensor, Tensor]:
    """Scores and targets of all samples, in evaluation mode."""
    model.eval()
    parts = [data.take(np.arange(s, min(s + 500, len(data)))) for s in range(0, len(data), 500)]
    if bf16:
        parts = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in parts]
    with torch.autocast(data.inputs.device.type, torch.bfloat16, enabled=bf16):
        scores, targets = torch.cat([model(x) for x, _ in parts]), torch.cat([y for _, y in parts])
    model.train()
    return scores.float(), targets


def bootstrap(scores: Tensor, targets: Tensor) -> tuple[float, float]:
    """The interval that holds 95 of 100 AUCs of samples drawn again."""
    draws = torch.from_numpy(np.random.default_rng(0).integers(0, len(targets), (200, len(targets))))
    values = sorted(auc(scores[draw], targets[draw]) for draw in draws.to(scores.device))
    return values[4], values[194]
