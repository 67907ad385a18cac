"""A few steps of a recipe on this machine alone, for whoever measures them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from thinwire.recipes import registry
from thinwire.recipes.config import RunConfig
from thinwire.recipes.learners import RecipeLearners
from thinwire.recipes.setup import RunSetup


def load(config: RunConfig) -> tuple[Callable[[int], None], int]:
    """A function that makes so many steps on one fixed batch, and the steps of the whole training."""
    with torch.random.fork_rng(devices=[]):
        learners = RecipeLearners(
            RunSetup.load(registry.get(config.recipe), config), lambda *_: None, agree=False
        )
    return learners.trial, learners.plan.num_steps
