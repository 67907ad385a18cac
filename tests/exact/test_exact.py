"""Several workers end with the weights of one that had the whole batch: in threads, three of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.exact.compare import arrays, difference, same_bits
from tests.exact.training import OVERLAPS, TRAININGS, Training, alone
from tests.worlds import run_threads
from thinwire.strategies.base import Overlap

TOLERANCE = 1e-9


@pytest.mark.timeout(600)
@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("training", TRAININGS, ids=lambda t: f"{t.case}-{t.optimizer}")
def test_equals_one_worker_with_the_whole_batch(
    training: Training, overlap: Overlap, world_size: int
) -> None:
    everyone = run_threads(world_size, lambda lane: training.with_thinwire(overlap, lane), timeout_s=500)

    assert difference(everyone[0], alone(training)) < TOLERANCE
    assert all(same_bits(weights, everyone[0]) for weights in everyone)


def test_the_training_moves_every_weight_but_the_spare_ones() -> None:
    """Else the comparison would show nothing."""
    training = Training("transformer", "sgd")
    before = arrays(training.build()[0])
    after = alone(training)
    kept = {name for name in after if np.array_equal(before[name], after[name])}

    assert kept == {"spare.weight", "spare.bias"}
