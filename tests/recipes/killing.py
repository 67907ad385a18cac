"""A recipe in processes that are killed; it writes down which samples were used in which step."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.worlds import Processes
from thinwire.engine import folders
from thinwire.recipes.base import Data, Recipe, Samples, Training
from thinwire.recipes.catalog import digits_cnn
from thinwire.recipes.config import resolve
from thinwire.recipes.train import WorkerContext, train

SAVE_EVERY = 4
EPOCHS = 2
NUM_SAMPLES = 720
BATCH_SIZE = 6  # so that with 4, 2 and 3 workers the rest of an epoch always divides by 3


@dataclass(frozen=True, slots=True)
class Diary:
    """Samples that write into a file what is taken of them, and take their time."""

    samples: Samples
    path: Path

    def __len__(self) -> int:
        return NUM_SAMPLES

    def take(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        with self.path.open("a") as file:
            file.write(json.dumps(indices.tolist()) + "\n")
        time.sleep(0.01)
        return self.samples.take(indices)


def recorded(path: Path) -> Recipe:
    """The default recipe, dropout and all, on fewer samples and with a diary."""
    recipe = digits_cnn()

    def training() -> Training:
        usual = recipe.training()

        def data(folder: Path | None) -> Data:
            loaded = usual.data(folder)
            return Data(Diary(loaded.train, path), loaded.test)

        return replace(usual, data=data)

    return replace(recipe, training=training)


def worker(run: Path, stage: int) -> None:
    """One worker of a stage; all but the first go on from what is there."""
    import torch.distributed as dist

    config = resolve(
        "digits-cnn",
        "all-reduce",
        workers=dist.get_world_size(),
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        save_every=SAVE_EVERY,
        resume=True,
    )
    diary = run / f"samples-{stage}-{dist.get_rank()}"
    where = WorkerContext(dist.get_rank(), dist.get_world_size(), checkpoints=run / "checkpoints")
    train(recorded(diary), config, where, lambda record: None)


def common(path: Path) -> dict[str, Any]:
    """What all workers share in a checkpoint."""
    return folders.read_part(path, folders.read_manifest(path), folders.COMMON, ())


@dataclass(slots=True)
class Stage:
    """What became of one start."""

    world_size: int
    began: int
    """The step it went on from."""
    half_saved: bool = False
    """Whether the kill came while a checkpoint was being written."""


class Story:
    """Starts and kills of one run, one after the other."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.checkpoints = run / "checkpoints"
        self.stages: list[Stage] = []
        run.mkdir()

    def saved_step(self) -> int:
        whole = folders.whole(self.checkpoints)
        return folders.read_manifest(whole[-1]).step if whole else 0

    def steps(self, stage: int, rank: int = 0) -> list[list[int]]:
        """The samples of the steps that a worker has begun in a stage."""
        path = self.run / f"samples-{stage}-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("]")]

    def start(self, world_size: int) -> Processes:
        self.stages.append(Stage(world_size, self.saved_step()))
        return Processes(world_size, worker, self.run, len(self.stages) - 1)

    def kill_when(self, world_size: int, ready: Callable[[], bool], dice: random.Random) -> None:
        """Start, and when it is `ready`, and a moment has passed, kill one worker and then all."""
        processes = self.start(world_size)
        try:
            deadline = time.monotonic() + 90
            while not ready():
                assert time.monotonic() < deadline, "it never came to that"
                time.sleep(0.002)
            time.sleep(dice.uniform(0, 0.05))
            dice.choice(processes.workers).kill()
            time.sleep(dice.uniform(0, 0.05))
        finally:
            processes.kill()
        self.stages[-1].half_saved = any(self.checkpoints.glob("*.saving-*"))

    def finish(self, world_size: int) -> dict[str, Any]:
        """Start and let it come to its end; the final state that all workers share."""
        processes = self.start(world_size)
        try:
            for rank in range(world_size):
                well, result = processes.outcome(rank, 100)
                assert well, result
        finally:
            processes.kill()
        assert not any(self.checkpoints.glob("*.*")), "something is left half saved"
        return common(folders.whole(self.checkpoints)[-1])

    def counted(self) -> list[list[int]]:
        """The samples of each step that counts: of those made twice, because of a kill, the later ones."""
        used: list[list[int]] = []
        for number, stage in enumerate(self.stages):
            del used[stage.began :]
            parts = [self.steps(number, rank) for rank in range(stage.world_size)]
            used += [[i for batch in step for i in batch] for step in zip(*parts, strict=False)]
        return used
