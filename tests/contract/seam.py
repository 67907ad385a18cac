"""Checks of the seam that run in any world; each is called by all workers of it."""

from __future__ import annotations

import time
from itertools import product
from typing import Any, get_args

import hypothesis
import hypothesis.strategies as st
import torch
from torch import nn

import thinwire as tw
from tests.contract.toys import Centre, ComesBack, HierarchicalMean, ParameterServer, Phases, Place
from thinwire.wire.base import Lane

BUCKETS = 3
MS = [0.0, 0.0, 1.0, 3.0]


def small_model(rank: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Three layers of one number each, so three buckets."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(BUCKETS))).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(1.0 + number)
    return model, torch.optim.SGD(model.parameters(), lr=0.01 * (rank + 1))


def attach(model: nn.Module, optimizer: Any, strategy: tw.Strategy, lane: Lane | None) -> tw.Link:
    return tw.attach(model, optimizer, strategy, process_group=lane, bucket_bytes=8, timeout_s=500)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
    optimizer.step()


def state_of(link: tw.Link) -> Any:
    return link._core.groups[0].state


def weights_of(model: nn.Module) -> list[float]:
    return [p.item() for p in model.parameters()]


def phases_in_order(lane: Lane | None, world_size: int, examples: int) -> int:
    """Sums are right whatever the delays; all workers draw the same tables of them. Gives how many were
    tried."""
    per_bucket = st.tuples(*[st.sampled_from(MS)] * 3)
    tables = st.tuples(*[st.tuples(*[per_bucket] * BUCKETS)] * world_size)
    tried = 0
    for seam, phases in product(("reduce", "mix", "background"), (2, 3, 5)):
        strategy = Phases(phases=phases, seam=seam)
        model, optimizer = small_model()
        with attach(model, optimizer, strategy, lane) as link:
            state, sums = state_of(link), [strategy.expected(b, link.world_size) for b in range(BUCKETS)]

            @hypothesis.settings(max_examples=-(-examples // 9), derandomize=True, database=None)
            @hypothesis.given(tables)
            def check(table: Any) -> None:
                nonlocal tried
                tried += 1
                state.delays_ms[:] = table[link.rank]  # noqa: B023  # called before the loop goes on
                step(model, optimizer)  # noqa: B023
                link.synchronize()
                assert [total.item() for total in state.totals] == sums  # noqa: B023

            check()
    return tried


def hierarchical_mean(lane: Lane | None) -> list[list[float]]:
    """A worker's weights after each of four steps, with learning rates that differ by worker."""
    weights = []
    model, optimizer = small_model()
    with attach(model, optimizer, HierarchicalMean(), lane) as link:
        optimizer.param_groups[0]["lr"] = 0.01 * (link.rank + 1)
        for _ in range(4):
            step(model, optimizer)
            weights.append(weights_of(model))
    return weights


def parameter_server(lane: Lane | None, steps: int = 30) -> tuple[int, list[int], float]:
    """Messages sent by this worker, messages handled here by sender, and seconds; worker 2 is slow."""
    model, optimizer = small_model()
    with attach(model, optimizer, ParameterServer(), lane) as link:
        began_s = time.perf_counter()
        for number in range(steps):
            if link.rank == 2:
                time.sleep(0.02)
            step(model, optimizer)
            if number == steps // 2:
                link.synchronize()  # a pause: it goes on after it
        took_s = time.perf_counter() - began_s
        link.synchronize()
        state: Centre = state_of(link)
    return state.sent, state.served, took_s


def comes_back_everywhere(lane: Lane | None) -> dict[str, set[str]]:
    """By place: the threads in which a coroutine ran after asking for the training thread."""
    found = {}
    for place in get_args(Place):
        model, optimizer = small_model()
        with attach(model, optimizer, ComesBack(place=place), lane) as link:
            for _ in range(3):
                step(model, optimizer)
            link.synchronize()
            found[place] = state_of(link).names
    return found
