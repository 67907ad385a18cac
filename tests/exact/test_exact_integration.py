"""Every combination in spawned Gloo processes, where torch's DDP trains beside us on the same data."""

from __future__ import annotations

import pytest
import torch

from tests.exact.compare import Arrays, difference, once, same_bits
from tests.exact.training import OVERLAPS, TRAININGS, Training, alone
from tests.worlds import run_processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

TOLERANCE = 1e-9
Results = dict[tuple[Training, str], Arrays]
"""By training and how it was run: "ddp" or one of our overlaps."""

in_float64 = TRAININGS
in_float32 = [Training(t.case, t.optimizer, torch.float32) for t in TRAININGS]


def train_all(trainings: list[Training]) -> Results:
    """What one worker of the world does: starting it takes longer than any training here."""
    results: Results = {}
    for training in trainings:
        results[training, "ddp"] = training.with_ddp()
        for overlap in OVERLAPS:
            results[training, overlap] = training.with_thinwire(overlap, None)
    return results


BY_WORLD_SIZE = {2: in_float64 + in_float32[::3], 3: in_float64[::3], 4: in_float64[-1:]}
"""Threads do all of them with 3 workers (test_exact.py); here each takes seconds."""


@once
def world(world_size: int) -> list[Results]:
    return run_processes(world_size, train_all, BY_WORLD_SIZE[world_size], timeout_s=800)


@pytest.mark.parametrize(
    ("world_size", "training"),
    [(size, t) for size, trainings in BY_WORLD_SIZE.items() for t in trainings if t in in_float64],
    ids=str,
)
def test_equals_one_process_and_ddp(world_size: int, training: Training) -> None:
    for overlap in OVERLAPS:
        everyone = [results[training, overlap] for results in world(world_size)]
        assert difference(everyone[0], alone(training)) < TOLERANCE
        assert difference(everyone[0], world(world_size)[0][training, "ddp"]) < TOLERANCE
        assert all(same_bits(weights, everyone[0]) for weights in everyone)


@pytest.mark.parametrize("training", in_float32[::3], ids=lambda t: f"{t.case}-{t.optimizer}")
def test_two_workers_have_the_bits_of_ddp(training: Training) -> None:
    for results in world(2):
        for overlap in OVERLAPS:
            assert same_bits(results[training, overlap], results[training, "ddp"])
