"""Time to accuracy with apoptosis and without, on four emulated hosts at 100 Mbit/s.

    python -m benchmarks.apoptosis_lab --data DIR --timed-steps 40       mnist-mlp, one seed, 3 quiet minutes
    python -m benchmarks.apoptosis_lab --data DIR --problems higgs-mlp,mnist-cnn --seeds 0,1,2
    python -m benchmarks.apoptosis_lab --data DIR --epochs 0.2 --trial   a minute, to see it work

All reduce in both, on the same batches; a worker's batch is as large as the problem's. Seconds are those of
the slowest worker, without evaluation, bytes those that interfaces count. The metric is that of samples held
out of the training data. Both train on until the epochs are over.

Without apoptosis all steps send and compute the same. With --timed-steps N that training makes N steps in the
lab, for the time and bytes of one; its metrics are those of the same training in one process, which computes
the same with the whole batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import thinwire as tw
from benchmarks.apoptosis_problems import PROBLEMS, Problem
from benchmarks.apoptosis_training import NUM_CHECKS, batches, count, load, predict
from benchmarks.common import (
    lab_worker,
    note,
    parser_of,
    print_head,
    print_row,
    result_file,
    run_in_lab,
)
from thinwire.hosts.description import describe
from thinwire.lab.control import Control
from thinwire.recipes.samples import TensorSamples

HOSTS = 4
EPOCHS = {"mnist-mlp": 2.0, "higgs-mlp": 8.0, "mnist-cnn": 2.0}
"""Fewer than the problems have: without apoptosis, an epoch takes minutes."""
NUM_POINTS = 24
"""Of the curve."""
WITHIN = 0.003


@dataclass
class Curve:
    """One training in the lab, as rank 0 tells it."""

    problem: str
    method: str
    seed: int
    points: list[dict[str, float]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def seconds_to(self, metric: float) -> float | None:
        return next((p["seconds"] for p in self.points if p["metric"] >= metric), None)


@dataclass
class Parts:
    """What one worker trains on."""

    problem: Problem
    train: TensorSamples
    held: TensorSamples

    @classmethod
    def of(cls, name: str, data: Path) -> Parts:
        train, held, _ = load(name, data, torch.device("cpu"))
        return cls(PROBLEMS[name], train, held)


def worker(options: argparse.Namespace) -> None:
    with lab_worker() as control:
        for name in options.problems.split(","):
            parts = Parts.of(name, options.data)
            for seed in map(int, options.seeds.split(",")):
                for method in ("adaptive", "none"):
                    curve = Curve(name, method, seed)
                    limit = options.timed_steps if method == "none" else None
                    train(curve, parts, options.epochs or EPOCHS[name], control, limit, options.start)
                    if dist.get_rank() == 0:
                        control.report(vars(curve))


@dataclass
class Training:
    """What every worker has, and one process that plays all of them."""

    problem: Problem
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    order: Iterator[Any]
    """All samples of each step."""
    steps: int

    @classmethod
    def of(cls, parts: Parts, epochs: float, seed: int) -> Training:
        problem, size = parts.problem, HOSTS * parts.problem.batch
        steps = int(epochs * (len(parts.train) // size))
        torch.manual_seed(seed)
        model = problem.model()
        optimizer = problem.optimizer(model)
        up = max(1, steps // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda at: min((at + 1) / up, max(0.0, (steps - at) / (steps - up)))
        )
        order = (
            chosen
            for epoch in range(int(epochs) + 1)
            for chosen in batches(len(parts.train), size, 1000 * seed + epoch)
        )
        return cls(problem, model, optimizer, schedule, order, steps)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.problem.loss(self.model(inputs), targets)
        loss.backward()
        return loss

    def is_point(self, step: int) -> bool:
        return step % max(1, self.steps // NUM_POINTS) == 0 or step == self.steps


def train_alone(curve: Curve, parts: Parts, epochs: float) -> None:
    """Metrics of the training without apoptosis, in one process; seconds and bytes are those of timed steps,
    the first of which has more to do."""
    early, late = curve.points[0], curve.points[-1]
    each = {key: (late[key] - early[key]) / (late["step"] - early["step"]) for key in early}
    training, curve.points = Training.of(parts, epochs, curve.seed), []
    for step, chosen in zip(range(1, training.steps + 1), training.order, strict=False):
        training.loss(*parts.train.take(chosen))
        training.optimizer.step()
        training.schedule.step()
        if training.is_point(step):
            point = {key: each[key] * step for key in ("step", "seconds", "sent_bytes")}
            point["metric"] = training.problem.metric(*predict(training.model, parts.held))
            curve.points.append({**point, "parameters": count(training.model)})


def train(
    curve: Curve, parts: Parts, epochs: float, control: Control, limit: int | None, start: float | None
) -> None:
    training = Training.of(parts, epochs, curve.seed)
    steps, problem, model = training.steps, training.problem, training.model
    first = None if start is None else max(1, int(start * steps))
    every = max(1, steps // NUM_CHECKS)
    settings = tw.Apoptosis(every=every, start=first) if curve.method == "adaptive" else None
    with tw.attach(model, training.optimizer, tw.AllReduce(), num_steps=steps, apoptosis=settings) as link:
        clock = Clock(link, control)
        for step, chosen in zip(range(1, (limit or steps) + 1), training.order, strict=False):
            link.observe(training.loss(*parts.train.take(chosen[link.rank :: link.world_size])))
            training.optimizer.step()
            training.schedule.step()
            if training.is_point(step) or (limit and step in (limit // 4, limit)):
                clock.stop()
                point = {"step": float(step), "seconds": clock.seconds, "sent_bytes": clock.sent_bytes}
                point |= {"metric": evaluate(problem, model, parts.held, link), "parameters": count(model)}
                curve.points.append(point)
                clock.go()
        if settings is not None:
            events = link.companion.history  # type: ignore[union-attr]
            curve.events = [
                {"step": e.step, "widths": dict(e.widths), "seconds": e.seconds, "causes": dict(e.causes)}
                for e in events
            ]


class Clock:
    """Seconds and bytes of training, of this worker, while it goes."""

    def __init__(self, link: tw.Link, control: Control) -> None:
        self._link, self._control = link, control
        self.seconds, self.sent_bytes = 0.0, 0.0
        self.go()

    def go(self) -> None:
        self._link.all_reduce([0.0])
        self._bytes, self._began_s = self._counted(), time.perf_counter()

    def stop(self) -> None:
        self._link.synchronize()
        self._link.all_reduce([0.0])  # the slowest worker's time
        self.seconds += time.perf_counter() - self._began_s
        self.sent_bytes += self._counted() - self._bytes

    def _counted(self) -> int:
        return self._control.counters()[self._link.rank].sent_bytes


def evaluate(problem: Problem, model: torch.nn.Module, held: TensorSamples, link: tw.Link) -> float:
    """Workers hold the same model: rank 0 looks, and tells the others."""
    value = problem.metric(*predict(model, held)) if link.rank == 0 else 0.0
    return link.all_reduce([value])[0]


def table(curves: list[Curve]) -> list[dict[str, Any]]:
    rows = []
    for plain in (c for c in curves if c.method == "none"):
        ours = next(
            (c for c in curves if (c.problem, c.method, c.seed) == (plain.problem, "adaptive", plain.seed)),
            None,
        )
        if ours is None:
            continue
        best = max(p["metric"] for p in plain.points) - WITHIN
        theirs, mine = plain.seconds_to(best), ours.seconds_to(best)
        last, end = plain.points[-1], ours.points[-1]
        rows.append(
            {
                "problem": plain.problem,
                "seed": plain.seed,
                "target": best,
                "seconds": [theirs, mine],
                "times_sooner": theirs / mine if theirs and mine else None,
                "whole_run_s": [last["seconds"], end["seconds"]],
                "sent_bytes": [last["sent_bytes"], end["sent_bytes"]],
                "metric": [last["metric"], end["metric"]],
                "parameters": [last["parameters"], end["parameters"]],
            }
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST and higgs.npz")
    parser.add_argument("--problems", default="mnist-mlp", help="comma-separated, of " + ", ".join(EPOCHS))
    parser.add_argument("--seeds", default="0", help="comma-separated (0)")
    parser.add_argument("--epochs", type=float, help="other than this benchmark's own")
    parser.add_argument("--timed-steps", type=int, help="of the training without apoptosis, in the lab (all)")
    parser.add_argument("--start", type=float, help="share of the steps before the first event (an eighth)")
    parser.add_argument("--rate", default="100mbit", help="of every host's path (100mbit)")
    parser.add_argument("--trial", action="store_true", help="only shows that it works")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        worker(options)
        return
    file = result_file("apoptosis_lab", trial=options.trial)
    inside = ["benchmarks.apoptosis_lab", "--inside", "--data", str(options.data.absolute())]
    inside += ["--problems", options.problems, "--seeds", options.seeds]
    inside += ["--epochs", str(options.epochs)] if options.epochs else []
    inside += ["--start", str(options.start)] if options.start else []
    inside += ["--timed-steps", str(options.timed_steps)] if options.timed_steps else []
    outcome = run_in_lab(describe(hosts=HOSTS, rate=options.rate), *inside, time_limit_s=1800)
    curves = [Curve(**each) for each in outcome.reports]
    for curve in curves if options.timed_steps else ():
        if curve.method == "none":
            parts = Parts.of(curve.problem, options.data)
            train_alone(curve, parts, options.epochs or EPOCHS[curve.problem])
    rows = table(curves)
    config = {**vars(options), "data": "DIR", "hosts": HOSTS, "busy_share": outcome.busy_share}
    file.save({"config": config, "table": rows}, runs=[vars(c) for c in curves])
    print_head("problem", "seed", "target", "seconds without, with", "times sooner", "sent", "parameters")
    for row in rows:
        sooner = "not reached" if row["times_sooner"] is None else f"{row['times_sooner']:.1f}x"
        sent = 1 - row["sent_bytes"][1] / row["sent_bytes"][0]
        times = ", ".join("-" if each is None else f"{each:.1f}" for each in row["seconds"])
        print_row(
            row["problem"], row["seed"], f"{row['target']:.4f}", times, sooner, f"{sent:.0%} less",
            f"{row['parameters'][0] / row['parameters'][1]:.1f}x fewer",
        )  # fmt: skip
    note(f"saved {file.path}")


if __name__ == "__main__":
    main()
