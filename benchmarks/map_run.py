"""One training of the map: what it is, how it is trained in portions, and what is kept of it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import ParameterList

from benchmarks.common import note
from thinwire.bench.config import provenance
from thinwire.hosts.description import describe
from thinwire.recipes import registry
from thinwire.recipes.base import Carried, Recipe, TrainingPlan
from thinwire.recipes.config import RunConfig, resolve
from thinwire.recipes.virtual import VirtualCluster, VirtualTraining, virtual_training
from thinwire.simulate.clock import ComputeModel
from thinwire.simulate.network import Network
from thinwire.simulate.sizes import step_ends
from thinwire.strategies import registry as strategies
from thinwire.strategies.base import overrides

RATES = ("20mbit", "100mbit", "1gbit")
LATENCY_S = 0.0004
COMPUTE_S = 0.01
"""Seconds per step: about what one replica of these small models takes on a GPU, where the launches of its
kernels are what takes time, whatever the batch is."""
GLOBAL_BATCH = {"cifar-resnet20": 256, "digits-cnn": 64, "mnist-cnn": 128}
"""Samples of all workers together, so that every number of workers makes the same steps; with other recipes
every worker has the recipe's own batch size."""
MEASURE_THE_WIRE = ("share", "interval", "budget")
"""Settings that, when "auto", are chosen from times."""
ONE_BUCKET_BYTES = 2**30
SAVE_EVERY_S = 45.0
TELL_EVERY_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MapTask:
    """One training to do."""

    recipe: str
    strategy: str
    workers: int
    seed: int
    rate: str | None
    """None: the training is the same at every rate."""
    epochs: int
    device: str = "auto"
    data: Path | None = None

    @property
    def name(self) -> str:
        """The name of its files."""
        parts = (self.recipe, self.workers, self.strategy, self.rate or "any", f"e{self.epochs}", self.seed)
        return re.sub(r"[^A-Za-z0-9.=+-]+", "_", "-".join(map(str, parts)))

    @property
    def config(self) -> RunConfig:
        own = registry.get(self.recipe).batch_size
        size = GLOBAL_BATCH[self.recipe] // self.workers if self.recipe in GLOBAL_BATCH else own
        return resolve(
            self.recipe,
            self.strategy,
            workers=self.workers,
            epochs=self.epochs,
            batch_size=max(1, size),
            seed=self.seed,
            data=self.data,
            device=self.device,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MapRun:
    """One training that is done."""

    recipe: str
    strategy: str
    workers: int
    seed: int
    rate: str | None
    epochs: int
    batch_size: int
    """Of one worker."""
    metric: str
    value: float | None
    """After the last epoch."""
    steps: list[int]
    """Steps done at the end of each epoch; `values` and `seconds` are of these moments."""
    values: list[float | None]
    seconds: dict[str, list[float]]
    """By rate."""
    sent_bytes_per_step: float
    """Of one worker."""
    num_parameters: int
    distance: float
    compute_s: float
    wall_s: float
    device: str
    made_with: dict[str, str]
    whole: bool = True
    """False: something stopped it shortly before the last epoch, and it will be trained anew."""

    @property
    def key(self) -> tuple[object, ...]:
        """What a task and its run have in common."""
        return (self.recipe, self.strategy, self.workers, self.seed, self.rate, self.epochs)


def key_of(task: MapTask) -> tuple[object, ...]:
    return (task.recipe, task.strategy, task.workers, task.seed, task.rate, task.epochs)


def feels_the_rate(text: str) -> bool:
    """Whether the rate of the network changes what a strategy learns: it measures, or waits for nobody."""
    strategy = strategies.from_text(text)
    measures = any(getattr(strategy, name, None) == "auto" for name in MEASURE_THE_WIRE)
    return measures or overrides(strategy, "serve")


def train(task: MapTask, folder: Path, deadline_s: float) -> MapRun | None:
    """Train in this process until it is done or there is no time for another epoch; None if so.

    `deadline_s` is on the machine's monotonic clock. What is not done is saved in `folder`, where the next
    call finds it; what is done is written there as JSON.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True  # batches have the same shape all along
    torch.backends.cuda.matmul.allow_tf32 = True  # as convolutions have it by default
    description = describe(hosts=task.workers, rate=task.rate or RATES[-1])
    # Buckets matter to the clock only: where it is played from sizes, one takes the fewest operations here.
    bucket_bytes = ONE_BUCKET_BYTES if task.rate is None else None
    cluster = VirtualCluster(
        description=description, latency_s=LATENCY_S, compute_s=COMPUTE_S, bucket_bytes=bucket_bytes
    )
    with virtual_training(_for_cpu(task), task.config, cluster) as training:
        saved = _Saved(folder / f"{task.name}.pt", training)
        if not saved.train_until(deadline_s, task.name):
            return None
        run = _result(task, training, saved.wall_s)
    write_whole(folder / f"{task.name}.json", lambda part: part.write_text(json.dumps(asdict(run)) + "\n"))
    saved.file.unlink(missing_ok=True)
    return run


def _for_cpu(task: MapTask) -> Recipe:
    """The recipe; on a CPU with images whose channels come last: convolutions are 1.3 times as fast then."""
    recipe = registry.get(task.recipe)
    training = recipe.training()

    def forward(model: Any, inputs: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        if inputs.ndim == 4 and inputs.device.type == "cpu":
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return training.forward(model, inputs, carried)

    return replace(recipe, training=lambda: replace(training, forward=forward))


class _Saved:
    """A training and the file that it is saved in, from which it goes on."""

    def __init__(self, file: Path, training: VirtualTraining) -> None:
        self.file, self._training = file, training
        self._began_s, self._past_s = time.monotonic(), 0.0
        if file.exists():
            saved = torch.load(file, map_location="cpu", weights_only=True)
            training.load_state_dict(saved["training"])
            self._past_s = saved["wall_s"]

    @property
    def wall_s(self) -> float:
        """In all processes together."""
        return self._past_s + time.monotonic() - self._began_s

    def train_until(self, deadline_s: float, name: str) -> bool:
        """Gives whether the training is done; what is not is saved."""
        training = self._training
        saved_s = told_s = time.monotonic()
        while not training.done:
            began_s = time.monotonic()
            evaluated = training.epoch()
            now_s = time.monotonic()
            is_last = now_s + 1.1 * (now_s - began_s) > deadline_s
            if now_s - told_s > TELL_EVERY_S or is_last:
                told_s = now_s
                note(f"{name}: epoch {evaluated.epoch}, {evaluated.metric} {evaluated.value}")
            if (is_last or now_s - saved_s > SAVE_EVERY_S) and not training.done:
                self._save()
                saved_s = time.monotonic()
            if is_last:
                break
        return training.done

    def _save(self) -> None:
        state = {"training": self._training.state_dict(), "wall_s": self.wall_s}
        write_whole(self.file, lambda part: torch.save(state, part))


def _result(task: MapTask, training: VirtualTraining, wall_s: float) -> MapRun:
    result, evaluations, told = training.result(), training.evaluations, provenance()
    return MapRun(
        recipe=task.recipe,
        strategy=task.strategy,
        workers=task.workers,
        seed=task.seed,
        rate=task.rate,
        epochs=task.epochs,
        batch_size=task.config.batch_size,
        metric=result.summary.metric,
        value=result.summary.value,
        steps=[each.step for each in evaluations],
        values=[each.value for each in evaluations],
        seconds={} if task.rate is None else {task.rate: [round(e.train_s, 4) for e in evaluations]},
        sent_bytes_per_step=result.summary.sent_bytes_per_step,
        num_parameters=sum(p.numel() for p in registry.get(task.recipe).training().model().parameters()),
        distance=result.distance,
        compute_s=COMPUTE_S,
        wall_s=wall_s,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() and task.device != "cpu" else "cpu",
        made_with={name: told[name] for name in ("time", "commit", "torch", "numpy", "python", "thinwire")},
    )


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is there as a whole or not at all, whenever the process is ended."""
    part = path.with_suffix(f".{os.getpid()}.part")
    write(part)
    part.replace(path)


def clocked(run: MapRun) -> MapRun:
    """The run with the times of its epochs at all rates, played from sizes alone."""
    missing = [rate for rate in RATES if rate not in run.seconds] if run.rate is None else []
    if not missing:
        return run
    training = registry.get(run.recipe).training()
    plan = TrainingPlan(world_size=run.workers, batch_size=run.batch_size, num_steps=run.steps[-1])
    shapes = [tuple(p.shape) for p in training.model().parameters()]
    strategy, model = strategies.from_text(run.strategy), ComputeModel.of(run.compute_s)
    seconds = dict(run.seconds)
    for rate in missing:
        network = Network(describe(hosts=run.workers, rate=rate), latency_s=LATENCY_S)
        ends = step_ends(
            *(shapes, network, strategy, model, run.steps),
            make_optimizer=lambda parameters: training.optimizer(ParameterList(parameters), plan),
        )
        seconds[rate] = [round(end_s, 4) for end_s in ends]
    return replace(run, seconds=seconds)
