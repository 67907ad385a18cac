"""How small does apoptosis make a network, how much sooner is it trained, and what does that cost?

    python -m benchmarks.apoptosis --data DIR                 higgs-mlp, mnist-mlp and mnist-cnn, three seeds
    python -m benchmarks.apoptosis --data DIR --problems cifar-vgg16 --device cuda --seeds 1
    python -m benchmarks.apoptosis --data DIR --problems mnist-mlp --quick

Every method trains the same network on the same batches: without apoptosis; with it, adaptive and aggressive;
with a group lasso that removes the neurons it has emptied (as PruneTrain); and with torch-pruning, which
removes the neurons of smallest weights at the same events, down to the size that the adaptive run ended with,
and gets a new optimizer each time, since it makes new parameters. Evaluation is not timed. On a CPU, seconds
are those of the processor, in one thread: other work on the machine does not count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import thinwire as tw
from benchmarks.common import note, parser_of, print_head, print_row, result_file
from thinwire.data import load_cifar, load_higgs, load_mnist
from thinwire.recipes import networks, samples
from thinwire.recipes.base import Data

METHODS = ("none", "adaptive", "aggressive", "lasso", "torch-pruning")
WITHIN = 0.003
"""Of a metric: how far below the mean final one without apoptosis counts as the same."""


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for given, made in pairwise(widths[:-1]):
        layers += [nn.Linear(given, made), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-2], widths[-1]))


def auc(scores: Tensor, targets: Tensor) -> float:
    """The share of pairs, one of each class, that the scores put in the right order."""
    order = scores.flatten().double().argsort()
    ranks = torch.empty(len(order), dtype=torch.float64, device=scores.device)
    ranks[order] = torch.arange(1, len(order) + 1, dtype=torch.float64, device=scores.device)
    positive = targets.bool()
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(order) - count)))


def accuracy(scores: Tensor, targets: Tensor) -> float:
    return float((scores.argmax(1) == targets).double().mean())


def binary_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(scores.flatten(), targets.to(scores.dtype))


@dataclass(frozen=True, kw_only=True)
class Problem:
    data: Callable[[Path], Data]
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    epochs: int
    batch: int
    events: int
    """Events in the whole run, the last ones before three quarters of it."""
    lasso: float
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    metric: Callable[[Tensor, Tensor], float] = accuracy


PROBLEMS = {
    "higgs-mlp": Problem(
        data=lambda folder: samples.as_tensors(load_higgs(folder)),
        model=lambda: mlp(28, 300, 300, 300, 1),
        optimizer=lambda m: AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
        epochs=12,
        batch=64,
        events=9,
        lasso=0.02,
        loss=binary_loss,
        metric=auc,
    ),
    "mnist-mlp": Problem(
        data=lambda folder: samples.grey_images(load_mnist(folder), highest=255),
        model=lambda: mlp(784, 1024, 1024, 10),
        optimizer=lambda m: AdamW(m.parameters(), lr=1e-3, weight_decay=0.01),
        epochs=8,
        batch=128,
        events=8,
        lasso=0.02,
    ),
    "mnist-cnn": Problem(
        data=lambda folder: samples.grey_images(load_mnist(folder), highest=255),
        model=lambda: networks.small_cnn(side=28, num_pools=2, num_hidden=64),
        optimizer=lambda m: AdamW(m.parameters(), lr=3e-3, weight_decay=0.01),
        epochs=3,
        batch=64,
        events=6,
        lasso=0.02,
    ),
    "cifar-vgg16": Problem(
        data=lambda folder: samples.colour_images(load_cifar(folder)),
        model=networks.vgg16,
        optimizer=lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True),
        epochs=20,
        batch=128,
        events=15,
        lasso=0.002,
    ),
}


@dataclass
class Run:
    """One training, as it went."""

    problem: str
    method: str
    seed: int
    curve: list[dict[str, float]] = field(default_factory=list)
    """By epoch: training seconds, metric, parameters, and bytes one worker of many would have sent."""
    events: list[dict[str, Any]] = field(default_factory=list)
    event_s: float = 0.0
    parameters: tuple[int, int] = (0, 0)
    interval: tuple[float, float] | None = None
    """Bootstrap interval of the last AUC, 95 %."""


def batches(count: int, size: int, seed: int) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
    order = np.random.default_rng(seed).permutation(count)
    for start in range(0, count - size + 1, size):
        yield order[start : start + size]


class Trainer:
    """A network, its optimizer and one of the methods."""

    def __init__(self, problem: Problem, method: str, device: torch.device, steps: int, goal: int) -> None:
        self.problem, self.method, self.device = problem, method, device
        self.model = problem.model().to(device)
        self.optimizer = problem.optimizer(self.model)
        self.steps, self.schedule = steps, self._schedule(steps)
        self.every = max(1, int(0.75 * steps) // problem.events)
        self.last = self.every * problem.events
        self.goal, self.event_s, self.done = goal, 0.0, 0
        self.link: tw.Link | None = None
        if method in ("adaptive", "aggressive", "lasso"):
            mode, strength = ("conservative", problem.lasso) if method == "lasso" else (method, 0.0)
            settings = tw.Apoptosis(mode=mode, every=self.every, lasso=strength)  # type: ignore[arg-type]
            self.link = tw.attach(self.model, self.optimizer, tw.AllReduce(), apoptosis=settings)

    def _schedule(self, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
        up = max(1, steps // 20)
        return torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda at: min((at + 1) / up, max(0.0, (steps - at) / (steps - up)))
        )

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.problem.loss(self.model(inputs), targets)
        loss.backward()
        if self.link is not None:
            self.link.observe(loss)
        began_s = _now(self.device)
        self.optimizer.step()
        if self.link is not None and (self.done + 1) % self.every == 0:
            self.event_s += _now(self.device) - began_s
        self.schedule.step()
        self.done += 1
        if self.method == "torch-pruning" and self.done % self.every == 0 and self.done <= self.last:
            self._prune(inputs)
        if self.link is not None and self.done == self.last:
            self.link.detach()  # what is left trains as it is
            self.link = None

    def _prune(self, inputs: Tensor) -> None:
        """A step of iterative magnitude pruning, in equal parts down to the goal."""
        import torch_pruning as tp

        began_s, left = _now(self.device), (self.last - self.done) // self.every
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


def train(name: str, method: str, seed: int, data: Data, device: torch.device, goal: int, quick: bool) -> Run:
    problem, run = PROBLEMS[name], Run(name, method, seed)
    epochs = 2 if quick else problem.epochs
    torch.manual_seed(seed)
    per_epoch = len(data.train) // problem.batch
    trainer = Trainer(problem, method, device, per_epoch * epochs, goal)
    full, seconds, sent = count(trainer.model), 0.0, 0.0
    for epoch in range(epochs):
        began_s = _now(device)
        for chosen in batches(len(data.train), problem.batch, 1000 * seed + epoch):
            inputs, targets = data.train.take(chosen)
            sent += 8.0 * count(trainer.model)  # all-reduce: each number leaves a worker twice, nearly
            trainer.step(inputs, targets)
        seconds += _now(device) - began_s
        metric, interval = evaluate(trainer.model, problem, data)
        run.interval = interval
        point = {"epoch": epoch + 1, "seconds": seconds, "metric": metric}
        run.curve.append({**point, "parameters": count(trainer.model), "sent_bytes": sent})
        note(f"{name} {method} seed {seed}: {json.dumps(run.curve[-1])}")
        _note_events(run, trainer)
    run.parameters = (full, count(trainer.model))
    run.event_s = trainer.event_s
    return run


def _note_events(run: Run, trainer: Trainer) -> None:
    if trainer.link is not None and trainer.link.companion is not None:
        history = getattr(trainer.link.companion, "history", [])
        run.events = [
            {
                "step": e.step,
                "widths": dict(e.widths),
                "parameters": e.num_parameters,
                "causes": dict(e.causes),
            }
            for e in history
        ]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


@torch.no_grad()
def evaluate(model: nn.Module, problem: Problem, data: Data) -> tuple[float, tuple[float, float] | None]:
    model.eval()
    parts = [
        data.test.take(np.arange(s, min(s + 500, len(data.test)))) for s in range(0, len(data.test), 500)
    ]
    scores, targets = torch.cat([model(x) for x, _ in parts]), torch.cat([y for _, y in parts])
    model.train()
    metric, interval = problem.metric(scores, targets), None
    if problem.metric is auc:
        draws = np.random.default_rng(0).integers(0, len(targets), (200, len(targets)))
        values = sorted(auc(scores[torch.from_numpy(d)], targets[torch.from_numpy(d)]) for d in draws)
        interval = (values[4], values[194])
    return metric, interval


def seconds_to(run: Run, target: float) -> float | None:
    return next((p["seconds"] for p in run.curve if p["metric"] >= target), None)


def table(runs: list[Run]) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys(run.problem for run in runs):
        own = [run for run in runs if run.problem == name]
        base = {run.seed: run for run in own if run.method == "none"}
        target = float(np.mean([run.curve[-1]["metric"] for run in base.values()])) - WITHIN
        for method in dict.fromkeys(run.method for run in own):
            mine = [run for run in own if run.method == method]
            times = [(seconds_to(run, target), seconds_to(base[run.seed], target)) for run in mine]
            faster = [plain / ours for ours, plain in times if ours and plain]
            rows.append(
                {
                    "problem": name,
                    "method": method,
                    "final": float(np.mean([run.curve[-1]["metric"] for run in mine])),
                    "final_by_seed": [run.curve[-1]["metric"] for run in mine],
                    "interval": [run.interval for run in mine],
                    "fewer_parameters": float(np.mean([r.parameters[0] / r.parameters[1] for r in mine])),
                    "less_sent": 1
                    - float(
                        np.mean(
                            [r.curve[-1]["sent_bytes"] / base[r.seed].curve[-1]["sent_bytes"] for r in mine]
                        )
                    ),
                    "whole_run_faster": float(
                        np.mean([base[r.seed].curve[-1]["seconds"] / r.curve[-1]["seconds"] for r in mine])
                    ),
                    "faster_to_target": float(np.mean(faster)) if len(faster) == len(mine) else None,
                    "reached": f"{len(faster)} of {len(mine)}",
                    "event_share": float(np.mean([r.event_s / r.curve[-1]["seconds"] for r in mine])),
                    "target": target,
                }
            )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST, higgs.npz, cifar10")
    parser.add_argument("--problems", default="higgs-mlp,mnist-mlp,mnist-cnn")
    parser.add_argument("--methods", default=",".join(METHODS), help="none must be the first")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two epochs: shows that it works")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device, result = torch.device(options.device), result_file("apoptosis", trial=options.quick)
    runs: list[Run] = []
    for name in options.problems.split(","):
        with device:
            data = PROBLEMS[name].data(_folder(options.data, name))
        for seed in range(options.seeds):
            goal = 0
            for method in options.methods.split(","):
                runs.append(train(name, method, seed, data, device, goal, options.quick))
                goal = runs[-1].parameters[1] if method == "adaptive" else goal
                result.save(
                    {"config": {k: str(v) for k, v in vars(options).items()}, "table": table(runs)},
                    runs=[vars(r) for r in runs],
                )
    print_head(
        "problem", "method", "final", "parameters", "sent", "whole run", "to the same metric", "events"
    )
    for row in table(runs):
        to_target = (
            f"{row['faster_to_target']:.2f}x" if row["faster_to_target"] else f"reached by {row['reached']}"
        )
        print_row(
            row["problem"],
            row["method"],
            f"{row['final']:.4f}",
            f"{row['fewer_parameters']:.1f}x fewer",
            f"{row['less_sent']:.0%} less",
            f"{row['whole_run_faster']:.2f}x",
            to_target,
            f"{row['event_share']:.1%}",
        )
    note(f"written to {result.path}")


def _folder(data: Path, name: str) -> Path:
    return data / "MNIST" if name.startswith("mnist") and (data / "MNIST").exists() else data


if __name__ == "__main__":
    main()
