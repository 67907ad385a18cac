"""Kill -9 at random moments, go on: the same weights to the bit, and every sample once."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.recipes.killing import BATCH_SIZE, EPOCHS, NUM_SAMPLES, Story

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

NUM_KILLS = 4


def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    dice = random.Random(7)
    undisturbed = Story(tmp_path / "undisturbed").finish(2)
    story = Story(tmp_path / "killed")
    num_steps = EPOCHS * NUM_SAMPLES // (2 * BATCH_SIZE)
    for kill in range(NUM_KILLS):
        goal = max(1, int(num_steps * (kill + dice.random()) / NUM_KILLS) - story.saved_step())
        story.kill_when(2, lambda goal=goal: len(story.steps(len(story.stages) - 1)) >= goal, dice)  # type: ignore[misc]
    resumed = story.finish(2)
    assert [stage.began for stage in story.stages][-1] > 0
    for name, weight in undisturbed["model"].items():
        assert torch.equal(weight, resumed["model"][name])
    for index, moments in undisturbed["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, resumed["optimizer"]["state"][index][name])
    assert undisturbed["schedule"] == resumed["schedule"]
    assert once_per_epoch(story)


def test_from_4_to_2_to_3_workers_every_sample_is_used_once_per_epoch(tmp_path: Path) -> None:
    dice = random.Random(8)
    story = Story(tmp_path / "run")
    story.kill_when(4, lambda: story.saved_step() >= 8, dice)
    story.kill_when(2, lambda: story.saved_step() >= story.stages[1].began + 8, dice)
    story.finish(3)
    assert [stage.world_size for stage in story.stages] == [4, 2, 3]
    assert 0 < story.stages[1].began < story.stages[2].began
    assert once_per_epoch(story)


def once_per_epoch(story: Story) -> bool:
    """Whether each epoch, cut where the steps say, has every sample exactly once."""
    samples = [index for step in story.counted() for index in step]
    epochs = [samples[start : start + NUM_SAMPLES] for start in range(0, len(samples), NUM_SAMPLES)]
    return len(epochs) == EPOCHS and all(Counter(each) == Counter(range(NUM_SAMPLES)) for each in epochs)
