"""A worker process of a benchmark: `-m thinwire.bench.worker FOLDER steps SECONDS` or `FOLDER study NUMBER`.

FOLDER has a bench.json. Rank 0 writes the measured blocks into its event file there. A study trains a recipe
with any system in the loop of `thinwire train`, and counts bytes the same way for all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.bench import config as configs
from thinwire.bench.config import BenchConfig, Study, run_folder
from thinwire.bench.harness import OPEN_BITS_PER_S, LabPaths, block_without_times, joined, time_block
from thinwire.bench.plan import cells, fits, rotated
from thinwire.bench.systems import EXACT, Ours, System, find, load_rivals
from thinwire.engine.core import Stats
from thinwire.engine.link import Link
from thinwire.event_log import EventWriter
from thinwire.lab.control import Control
from thinwire.recipes import registry
from thinwire.recipes.base import Data, Recipe, Training
from thinwire.recipes.config import RunConfig, run_started, write_config
from thinwire.recipes.launch import LOG
from thinwire.recipes.setup import Attach, Attached, copy_rows
from thinwire.recipes.train import WorkerContext, train
from thinwire.recipes.worker import ReportFailure, run_and_exit
from thinwire.strategies.registry import parse, resolved
from thinwire.timings import GridCell


def measure_steps(config: BenchConfig, allowed_s: float, paths: LabPaths, events: EventWriter) -> None:
    """Go through the grid turn after turn, as long as there is time."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    rivals = load_rivals(config.rivals)
    systems = {name: find(name, rivals) for name in config.systems}
    absent = {name: reason for name, system in systems.items() if (reason := system.available())}
    began = time.monotonic()
    took_s: dict[GridCell, float] = {}
    for turn in range(config.turns):
        for cell in cells(config, workers, shaped=paths.shaped):
            start = time.monotonic()
            took = took_s.get(cell, 0.0)
            if not agreed(fits(turn=turn, elapsed_s=start - began, took_s=took, allowed_s=allowed_s)):
                continue
            for name in rotated(config.systems, turn):
                block = block_without_times(cell, turn, systems[name], absent.get(name))
                if name not in absent:
                    block = time_block(block, systems[name], paths, config)
                if rank == 0:
                    events.write(block)
            took_s[cell] = time.monotonic() - start


def measure_study(folder: Path, config: BenchConfig, study: Study, paths: LabPaths) -> None:
    """Train with one system after another, exact SGD first, as long as there is time."""
    rivals = load_rivals(config.rivals)
    began = time.monotonic()
    for name in sorted(config.systems, key=lambda name: name != EXACT):
        system = find(name, rivals)
        if system.available() is None and agreed(time.monotonic() - began < 60 * study.minutes):
            train_study(folder, study, system, paths)


def agreed(mine: bool) -> bool:
    """Rank 0's answer, on all workers."""
    answer = torch.tensor(int(mine))
    dist.broadcast(answer, src=0)
    return bool(answer)


def train_study(bench: Path, study: Study, system: System, paths: LabPaths) -> None:
    """Train with `system` as one of the workers, into an ordinary run folder."""
    folder = run_folder(bench, study, system.name)
    recipe = shortened(registry.get(study.recipe), study.samples)
    config = RunConfig(
        recipe=study.recipe,
        strategy=parse(system.name)[0],
        settings=resolved(system.strategy) if isinstance(system, Ours) else {},
        workers=study.workers,
        epochs=study.epochs,
        batch_size=study.batch_size or recipe.batch_size,
        data=study.data,
        device="cpu",
        evaluate_every=study.evaluate_every,
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        write_config(folder, config)
    paths.set_rate(study.rate_bits_per_s)
    with EventWriter(folder, rank) as writer:
        writer.write(run_started(config, world_size))
        train(recipe, config, WorkerContext(rank, world_size), writer.write, attach=join_by(system, paths))
    paths.set_rate(OPEN_BITS_PER_S)


def shortened(recipe: Recipe, samples: int | None) -> Recipe:
    """The recipe, trained on its first samples only, and tested on a quarter as many."""
    if samples is None:
        return recipe

    def training() -> Training:
        whole = recipe.training()

        def data(folder: Path | None) -> Data:
            full = whole.data(folder)
            train, test = copy_rows(full.train, slice(samples)), copy_rows(full.test, slice(samples // 4))
            return replace(full, train=train, test=test)

        return replace(whole, data=data)

    return replace(recipe, training=training)


def join_by(system: System, paths: LabPaths) -> Attach:
    """The training loop's join function of any system, ours or not."""

    @contextmanager
    def join(model: nn.Module, optimizer: Optimizer) -> Iterator[Attached]:
        with joined(system, model, optimizer) as (wrapped, wrapped_optimizer, link):
            agree = isinstance(system, Ours) and system.replicas_agree
            peers = StudyPeers(model, link, paths)
            yield Attached(model=wrapped, optimizer=wrapped_optimizer, link=peers, replicas_agree=agree)

    return join


class StudyPeers:
    """The other workers, as the training loop needs them: through the link, or a rival's process group.

    Sent bytes are counted by the network interface, for ours and rivals alike.
    """

    def __init__(self, model: nn.Module, link: Link | None, paths: LabPaths) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._model, self._link, self._paths = model, link, paths

    @property
    def stats(self) -> Stats:
        stats = Stats() if self._link is None else self._link.stats  # a rival reports nothing
        counted = replace(stats.traffic, sent_bytes=self._paths.sent_bytes())
        return replace(stats, traffic=counted) if self._paths.shaped else stats

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        if self._link is not None:
            return self._link.all_reduce(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        if self._link is not None:
            return self._link.clip_grad_norm_(max_norm)
        return nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean model of all workers inside the block, the worker's own after it."""
        if self._link is not None:
            with self._link.averaged():
                yield
            return
        model = self._model
        tensors = [t.data for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
        own = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(self.world_size)
        try:
            yield
        finally:
            torch._foreach_copy_(tensors, own)


def work(arguments: list[str]) -> None:
    """Do one part of the benchmark, named by the arguments."""
    folder, what, number = Path(arguments[0]), arguments[1], arguments[2]
    config = configs.read(folder)
    torch.set_num_threads(1)
    control = Control.from_environment()
    if control is not None:  # outside a lab, torch's launcher has redirected the output of systems
        with (folder / LOG).open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    with EventWriter(folder, int(os.environ["RANK"])) as events, ReportFailure(events.write):
        dist.init_process_group("gloo")
        if what == "steps":
            measure_steps(config, float(number), LabPaths(control), events)
        else:
            measure_study(folder, config, config.studies[int(number)], LabPaths(control))
        dist.barrier()


if __name__ == "__main__":
    run_and_exit(work)
