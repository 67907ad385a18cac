"""Two workers whose samples travel while they train a recipe."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.recipes.test_train import config
from tests.worlds import run_processes
from thinwire.events import Evaluated, Record, RunEnded
from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig
from thinwire.recipes.train import WorkerContext, train

pytestmark = pytest.mark.processes


def results(chosen: RunConfig, folder: Path) -> tuple[list[float | None], int]:
    """The test loss after each epoch (of rank 0), and the bytes this worker sent."""
    records: list[Record] = []
    worker = WorkerContext(dist.get_rank(), 2, dist.get_rank(), folder)
    train(registry.get(chosen.recipe), chosen, worker, records.append)
    losses = [record.loss for record in records if isinstance(record, Evaluated)]
    return losses, next(record.sent_bytes for record in records if isinstance(record, RunEnded))


def train_and_go_on(folder: Path) -> tuple[list[float | None], list[float | None], int]:
    """Two epochs of 23 steps; then again from the checkpoint in the middle of the second one."""
    usual = config(epochs=2, batch_size=32, device="cpu")
    ring = replace(usual, workers=2, shuffle="ring", save_every=30)
    losses, sent_bytes = results(ring, folder)
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step-00000046")
    dist.barrier()
    resumed, _ = results(replace(ring, resume=True), folder)
    _, without_ring = results(replace(usual, workers=2, shuffle="own"), folder / "none")
    return losses, resumed, sent_bytes - without_ring


def test_samples_travel_and_a_checkpoint_brings_them_back(tmp_path: Path) -> None:
    (losses, resumed, extra_bytes), (_, _, others) = run_processes(2, train_and_go_on, tmp_path)
    assert resumed == losses[1:]
    # half of the samples (64 bytes and a label of 8) travel in each of two epochs
    assert 718 * 72 <= extra_bytes == others < 718 * 72 + 1000
