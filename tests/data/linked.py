"""Workers with a link and nothing to train, for what travels beside training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

import thinwire as tw
from tests.worlds import run_threads
from thinwire.wire.base import Lane

T = TypeVar("T")


def with_link(work: Callable[[tw.Link], T], lane: Lane | None = None) -> T:
    """Do `work` attached to a model that sends nothing."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tw.attach(model, optimizer, tw.Silent(), process_group=lane, timeout_s=500) as link:
        return work(link)


def run_linked(world_size: int, work: Callable[[tw.Link], T]) -> list[T]:
    """The same in a world of threads."""
    return run_threads(world_size, lambda lane: with_link(work, lane))
